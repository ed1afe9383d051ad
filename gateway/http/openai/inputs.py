"""Prompts that are no chat: one or several, each a text or a list of token ids."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.ask import Body
from worker.protocol.errors import ApiError, bad_request

MAX_INPUTS: Final = 2048

_NONE: Final = msgspec.Raw(b"")
# No list: this stops at the first entry too many, however many millions follow.
_entries_decoder: Final = msgspec.json.Decoder(
    msgspec.defstruct(
        "Entries",
        [(f"entry_{at}", msgspec.Raw, _NONE) for at in range(MAX_INPUTS)],
        array_like=True,
        forbid_unknown_fields=True,
    )
)
_BEGINS_AS_IDS: Final = re.compile(rb"\[\s*+\d")


def read_inputs(body: Body, field: str) -> tuple[bytes, ...]:
    """The JSON of each. No value inside becomes a Python object. Raises ApiError (400)."""
    raw = bytes(body.get(field, b"null"))
    if raw.startswith(b'"') or _are_ids(raw):
        return (raw,)
    if not raw.startswith(b"["):
        raise _wrong(field)
    try:
        entries = _entries_decoder.decode(raw)
    except msgspec.ValidationError:
        raise bad_request(
            f"'{field}' has over {MAX_INPUTS} entries. Send them in several requests.", param=field
        ) from None
    found = tuple(value for entry in msgspec.structs.astuple(entries) if (value := bytes(entry)))
    if not found:
        raise bad_request(f"'{field}' is empty. Send at least one.", param=field, code="empty_array")
    texts = found[0].startswith(b'"')
    if not all(entry.startswith(b'"') if texts else _are_ids(entry) for entry in found):
        raise _wrong(field)
    return found


def _are_ids(raw: bytes) -> bool:
    """Of a JSON value: whether it is a list of whole numbers that are not negative."""
    return _BEGINS_AS_IDS.match(raw) is not None and raw.translate(None, b"0123456789, \t\r\n") == b"[]"


def _wrong(field: str) -> ApiError:
    return bad_request(
        f"'{field}' must be a text, a list of texts, a list of token ids, or a list of lists of token ids.", param=field
    )
