"""A request as it came to a door: what the gateway must know of it, and the body that is passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import UUID

import msgspec

Body = dict[str, msgspec.Raw]
"""The fields of a request, each still the JSON it came as."""

_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Ask:
    """What the gateway must know of a chat completion request, and the request itself."""

    body: Body
    model: str
    size: int
    """Bytes of the body as it came."""
    stream: bool
    include_usage: bool
    choices: int
    max_output_tokens: int | None
    end_user: str | None = None
    """Whom the client names as its own user, in its own words: never stored so."""
    tags: tuple[str, ...] = ()
    raw: bytes = b""
    """The body as it came."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request at the door: who asks is known before its body is read."""

    request_id: UUID
    key: str | None
    client_request_id: str | None
    read: Callable[[], Awaitable[Ask]]
    path: str = ""
    """Of the request's URL."""
    idempotency_key: str | None = None
    """As the header has it."""


def given(body: Body, field: str) -> bool:
    """Whether the request has the field, and it is not null."""
    return body.get(field, _NULL) != _NULL
