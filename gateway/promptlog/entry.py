"""What the prompt log holds of one request. There is no place in it for an API key, a header or a backend's secret."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from gateway.apis import Api
from gateway.policies.prompt_log import Level

MAX_COMMENT: Final = 2000
"""Characters."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a request without its bodies; ids and numbers are those of its row in the ledger."""

    request_id: UUID
    admitted_at: datetime
    project_id: UUID
    key_id: str
    """The API key's public id."""
    end_user: str | None = None
    """Keyed hash."""
    api: Api
    model: str
    """As the client asked for it."""
    backend: str | None = None
    status: str
    error_code: str | None = None
    streamed: bool = False
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    charged_nano_usd: int = 0
    first_token_ms: int | None = None
    total_ms: int | None = None
    cache: str | None = None
    """What the answer cache made of it."""
    tags: tuple[str, ...] = ()
    client_request_id: str | None = None
    request_cut: bool = False
    response_cut: bool = False


class Entry(Facts, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be logged. ``request``: the body as the client sent it; ``response``: the whole answer, put together
    if it was streamed. Empty if there is none. ``request_cut``, ``response_cut``: it was cut before it came here.
    """

    tenant_id: UUID
    request: bytes = b""
    response: bytes = b""


class Kept(Facts, frozen=True, kw_only=True, omit_defaults=True):
    """What is sealed as the entry's metadata, beside its bodies."""

    level: Level
    request_bytes: int = 0
    response_bytes: int = 0
    """Of the body as it is kept, before compression."""


class Feedback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client thinks of an answer."""

    score: float
    """From -1, bad, to 1, good; 0 is neither."""
    comment: str | None = None
    given_at: datetime

    def __post_init__(self) -> None:
        if not -1 <= self.score <= 1:  # NaN is in no range
            raise ValueError("score must be between -1 (bad) and 1 (good)")
        if self.comment is not None and len(self.comment) > MAX_COMMENT:
            raise ValueError(f"comment must have at most {MAX_COMMENT} characters")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as lists show it."""

    facts: Kept
    feedback: Feedback | None = None


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """An entry whole."""

    facts: Kept
    feedback: Feedback | None = None
    request: bytes | None = None
    response: bytes | None = None
    """None: not logged at the entry's level, or evicted by Redis for want of memory."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asked, to be asked again of another model."""

    api: Api
    model: str
    body: bytes
    """As the client sent it, or with what was redacted."""
    redacted: bool
    project_id: UUID
    end_user: str | None


class NotReplayable(Exception):
    """The entry does not hold the whole request. The message says why."""
