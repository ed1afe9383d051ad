"""A request's JSON body: decoded, held to its type, and refused by the name of the field that is wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from worker.protocol.errors import ApiError, bad_request

T = TypeVar("T")

_LONG_BODY: Final = 8 * 1024
_GRAMMAR: Final = re.compile(rb"response_format|structured_outputs|guided_|tool_choice|\\u")
"""Stands in every body that may hold a grammar: its name, or an escape that may hide it."""


def _takes_long(body: bytes) -> bool:
    """Whether running streams would stutter: the body is long, or may hold a grammar, whose check takes a while."""
    return len(body) >= _LONG_BODY or _GRAMMAR.search(body) is not None


async def read(body: bytes, reader: Callable[[bytes], T]) -> T:
    """What ``reader`` makes of a body: in a thread, if that may take long. Raises what ``reader`` does."""
    return await asyncio.to_thread(reader, body) if _takes_long(body) else reader(body)


def decode(body: bytes, needs: str) -> dict[str, Any]:
    """The body's fields. ``needs`` names the most important, for the message. Raises ApiError (400)."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as fault:
        raise bad_request(f"The body is not valid JSON: {fault}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request(f"The body must be a JSON object with {needs}.", code="invalid_json")
    return fields


def convert(fields: dict[str, Any], kind: type[T]) -> T:
    """``fields`` as ``kind``, a msgspec struct. Raises ApiError (400) that names the field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as fault:
        raise _of_wrong_type(fault) from None


Neutral = Callable[[Any], bool]
"""Whether a value asks for nothing."""


def neutral(*values: Any) -> Neutral:
    return lambda value: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def refuse_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, Neutral]) -> None:
    """Refuse fields that would change the answer and can't be obeyed, but with values that ask for nothing.

    Fields that are not known at all are ignored, as clients expect. Raises ApiError (400).
    """
    for name, asks_nothing in unsupported.items():
        value = fields.get(name)
        if value is not None and not asks_nothing(value):
            raise bad_request(
                f"This model's worker does not support {name!r}. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def invalid(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="invalid_value")


def shown(value: Any) -> str:
    """A value for a message: short, and quoted as JSON quotes it."""
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 60 else text[:57] + "..."


_FAULT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


def _of_wrong_type(fault: msgspec.ValidationError) -> ApiError:
    match = _FAULT.match(str(fault))
    assert match is not None
    what, path = match["what"], (match["path"] or "").replace("[...]", "")
    if len(what) > 200:  # it quotes values
        what = what[:197] + "..."
    if missing := _MISSING.search(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return bad_request(f"The field {name!r} is missing.", param=name, code="missing_required_parameter")
    return bad_request(f"{path!r} is of the wrong type: {what}.", param=path or None, code="invalid_type")
