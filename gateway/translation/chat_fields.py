"""Reads fields of a chat completion that are still JSON; what cannot be read is told by its place."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from gateway.ask import Body
from worker.protocol.errors import bad_request

T = TypeVar("T")
NULL: Final = msgspec.Raw(b"null")
ANYTHING: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()
OBJECT: Final[msgspec.json.Decoder[Body]] = msgspec.json.Decoder(Body)
ITEMS: Final[msgspec.json.Decoder[list[msgspec.Raw]]] = msgspec.json.Decoder(list[msgspec.Raw])
TEXT: Final[msgspec.json.Decoder[str]] = msgspec.json.Decoder(str)


def read(value: msgspec.Raw, decoder: msgspec.json.Decoder[T], where: str) -> T:
    """``where`` the value stands in the request. Raises ApiError (400)."""
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as fault:
        raise bad_request(f"'{where}' cannot be read: {fault}.", param=where) from None
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"'{where}' is not valid JSON, or is nested too deeply.", param=where) from None


def is_null(value: msgspec.Raw) -> bool:
    return value == NULL
