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
