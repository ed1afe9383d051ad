"""Fields of a Responses request, read one at a time: each is checked, or refused with its name and the remedy."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.ask import Body
from worker.protocol.errors import ApiError, bad_request

NULL: Final = msgspec.Raw(b"null")


def take(body: Body, field: str, type_: Any, what: str) -> Any:
    """The value of a field, which leaves ``body``; None, if it is not there or null.

    ``what`` it must be, as a clause: "true or false". Raises ApiError (400).
    """
    return read(body.pop(field, NULL), type_, field, what)


def read(raw: msgspec.Raw, type_: Any, field: str, what: str) -> Any:
    """Raises ApiError (400)."""
    try:
        return msgspec.json.decode(raw, type=type_ | None)
    except msgspec.ValidationError as fault:
        _, _, inside = str(fault).partition(" - at `$")
        place = field + inside.rstrip("`")
        raise bad_request(f"'{place}' is not right: '{field}' must be {what}.", param=place) from None
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"'{field}' cannot be read.", param=field) from None


def encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def unsupported(what: str, remedy: str, param: str) -> ApiError:
    return bad_request(f"{what} is not supported here. {remedy}", param=param, code="unsupported_value")
