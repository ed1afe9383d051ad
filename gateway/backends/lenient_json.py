"""JSON as backends send it: mostly as the standard has it."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def decoded(data: bytes) -> Any:
    """The value; None for what is none.

    Also where it is only nearly JSON, as Python's own encoder writes it: NaN, or an escaped half of a surrogate pair,
    which a model may well say where its output was cut.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def encoded(value: object) -> bytes:
    """What ``decoded`` gave, as JSON again."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":")).encode()


def strict(data: bytes) -> bytes | None:
    """JSON for what ``decoded`` takes though it is none: null for NaN, and U+FFFD for half a surrogate pair.

    None for what is JSON already, or nothing like it.
    """
    try:
        msgspec.json.decode(data)
        return None
    except RecursionError:
        return None
    except msgspec.DecodeError:
        pass
    try:
        text = json.dumps(json.loads(data, parse_constant=lambda _: None), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def as_utf8(data: bytes) -> bytes:
    """With U+FFFD in the place of what is no UTF-8, as the standard of event streams has it: clients may be strict."""
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").encode()
    return data
