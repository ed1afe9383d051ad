"""Tokens used and what they came to: the normalised record, and the event that becomes a ledger row."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

from gateway.tenants.principal import NO_PROJECT

NANO_PER_USD = 10**9
Status = Literal["ok", "aborted", "failed", "abandoned", "cache_hit", "replayed"]
UsageSource = Literal["backend", "counted", "estimated"]
USD_PATTERN = r"[0-9]{1,10}(\.[0-9]{1,9})?"
_USD = re.compile(USD_PATTERN)


def usd_text(nano_usd: int) -> str:
    """Nano-USD as USD, exactly, with all nine decimal places: ``0.000012345``."""
    whole, fraction = divmod(abs(nano_usd), NANO_PER_USD)
    return f"{'-' if nano_usd < 0 else ''}{whole}.{fraction:09d}"


def parse_usd(text: str) -> int:
    """Nano-USD that ``text`` means, exactly: ``12.50``. Raises ValueError with the remedy."""
    if not _USD.fullmatch(text):
        raise ValueError(f"{text[:50]!r} is not an amount in USD; write it as 12.50, with 9 decimal places at most")
    whole, _, fraction = text.partition(".")
    return int(whole) * NANO_PER_USD + int(fraction.ljust(9, "0"))


class TokenUsage(msgspec.Struct, frozen=True):
    """Running or final totals of one request, normalised from whatever its protocol reports.

    ``prompt_tokens`` are all that went in: those read from a cache (``cached_tokens``) and written to one
    (``cache_write_tokens``) are inside them. ``reasoning_tokens`` are inside ``completion_tokens``.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    source: UsageSource = "backend"
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    compute_us: int = 0
    """Device microseconds times ranks; 0 where the backend does not tell."""


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one admitted request came to. JSON in the shard's stream, then one row of ``usage_events``.

    Amounts are integer nano-USD, times timezone-aware UTC, durations milliseconds.
    """

    request_id: UUID
    admitted_at: datetime
    tenant_id: UUID
    key_id: str
    route: str
    status: Status
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    usage_source: UsageSource = "backend"
    charged_nano_usd: int
    cost_nano_usd: int
    price_id: UUID | None
    """None: unpriced; served by policy and marked so."""
    over_bound: bool = False
    """The charge came out above what was reserved."""
    streamed: bool = False
    backend: str | None = None
    attempts: int = 0
    error_code: str | None = None
    client_request_id: str | None = None
    """The client's own ``x-request-id``, cleaned; a correlation, never a key."""
    first_token_ms: int | None = None
    total_ms: int | None = None
    project_id: UUID = NO_PROJECT
    end_user: str | None = None
    """Keyed hash of the end user that the request names; None: it names none."""
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    compute_us: int = 0
    cost_price_id: UUID | None = None
    """By which ``cost_nano_usd`` was reckoned, if not by ``price_id``."""
    markup_bp: int = 0
    queue_ms: int | None = None
    """From the admission until the request was sent to the backend that served it."""
    tags: list[str] = []
    """As the request's header gave them: ``name`` or ``name=value``, sorted, each once."""
    api: str = "chat_completions"
    """Which of our APIs was called; see ``gateway.apis``."""
    failed_attempts: list[str] = []
    """Of those that failed, in their order: backend and error code, with a space between."""
    cache: str | None = None
    """By which tier a kept answer was found, ``exact`` or ``semantic``; None: by none."""
    saved_nano_usd: int = 0
    """What the answer would have cost the tenant, less what the hit did."""
    saved_tokens: int = 0
    """That it took when it was made."""
