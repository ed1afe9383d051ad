"""Prompts that are no chat: one or several, each a text or a list of token ids."""

from __future__ import annotations

import re
from typing import Final

from gateway.ask import Body
from worker.protocol.errors import ApiError, bad_request

MAX_INPUTS: Final = 2048

_TOKENS: Final = re.compile(rb"\[\s*+\d[\d\s,]*+\]")
_ENTRY: Final = re.compile(rb'[\s,]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|\[\s*+\d[\d\s,]*+\])')
_END: Final = re.compile(rb"\s*+\]")


def read_inputs(body: Body, field: str) -> tuple[bytes, ...]:
    """The JSON of each. No value inside becomes a Python object. Raises ApiError (400)."""
    raw = bytes(body.get(field, b"null"))
    if raw.startswith(b'"') or _TOKENS.fullmatch(raw):
        return (raw,)
    if not raw.startswith(b"["):
        raise _wrong(field)
    # It is JSON, as whoever cut the body into fields saw: commas stand where they must, and texts end.
    found: list[bytes] = []
    at = 1
    while (entry := _ENTRY.match(raw, at)) is not None:
        if len(found) == MAX_INPUTS:
            raise bad_request(f"'{field}' has over {MAX_INPUTS} entries. Send them in several requests.", param=field)
        found.append(entry[1])
        at = entry.end()
    if _END.fullmatch(raw, at) is None or len({entry[:1] for entry in found}) > 1:
        raise _wrong(field)
    if not found:
        raise bad_request(f"'{field}' is empty. Send at least one.", param=field, code="empty_array")
    return tuple(found)


def _wrong(field: str) -> ApiError:
    return bad_request(
        f"'{field}' must be a text, a list of texts, a list of token ids, or a list of lists of token ids.", param=field
    )
