"""Entries of a shard's usage stream, read with care: a strange byte must not stop the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gateway.billing.usage import UsageEvent

MAX_AMOUNT = 2**53 - 1
MAX_TOKENS = 10**12
MAX_COMPUTE_US = 10**13
MAX_MS = 2**53 - 1
MAX_REVISION = 1000
MAX_KEY_TEXT = 200
"""Longest key id and route: they are part of an index, so that longer ones are refused, not cut."""
MAX_NOTE_TEXT = 500
"""Longer texts that only explain are cut."""
MAX_TAGS = 32
MAX_ATTEMPTS = 20
MAX_ATTEMPT_TEXT = 300
MAX_TAG_TEXT = 200
"""More tags and longer ones are cut too."""
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)
LATEST_AHEAD = timedelta(days=32)
"""An event from further in the future is refused: it would make a partition for a month that may never come."""

NOTES = {
    # Part of an index, too.
    "backend": MAX_KEY_TEXT,
    "end_user": MAX_KEY_TEXT,
    "api": MAX_KEY_TEXT,
    "error_code": MAX_NOTE_TEXT,
    "client_request_id": MAX_NOTE_TEXT,
    "cache": MAX_NOTE_TEXT,
}
"""Texts that only explain, and the longest that each may be."""
RANGES = {
    "cached_tokens": (0, MAX_TOKENS),
    "cache_write_tokens": (0, MAX_TOKENS),
    "reasoning_tokens": (0, MAX_TOKENS),
    "images": (0, MAX_TOKENS),
    "compute_us": (0, MAX_COMPUTE_US),
    "markup_bp": (-10_000, 1_000_000),
    "attempts": (0, 10_000),
    "saved_nano_usd": (0, MAX_AMOUNT),
    "saved_tokens": (0, MAX_TOKENS),
}
"""Counts that only explain: the nearest that can be is taken."""

_decoder = msgspec.json.Decoder(UsageEvent)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class BadEntry(Exception):
    """An entry that cannot become a row; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One settled request, ready to be written. ``id`` is the entry's in the stream."""

    id: str
    raw: bytes
    event: UsageEvent
    revision: int


def read_entry(entry_id: str, fields: Mapping[bytes, bytes], now: datetime) -> Entry:
    """Raises BadEntry. NUL and lone surrogates, which Postgres cannot hold, become U+FFFD."""
    raw = fields.get(b"event")
    if raw is None:
        raise BadEntry("the entry has no field `event`")
    revision = revision_of(fields)
    if revision is None:
        raise BadEntry(f"revision {fields.get(b'revision', b'')[:20]!r} is not a number from 1 to {MAX_REVISION}")
    return Entry(entry_id, raw, _checked(_decoded(raw), now), revision)


def revision_of(fields: Mapping[bytes, bytes]) -> int | None:
    text = fields.get(b"revision", b"")
    return int(text) if text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_REVISION else None


def raw_of(fields: Mapping[bytes, bytes]) -> bytes:
    """What is kept of an entry that cannot become a row."""
    return fields[b"event"] if b"event" in fields else repr(dict(fields)).encode()


def _decoded(raw: bytes) -> UsageEvent:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Slower, and takes lone surrogates and broken UTF-8, which the cleaning then replaces.
        try:
            return msgspec.convert(_clean(json.loads(raw.decode("utf-8", "replace"))), UsageEvent)
        except (ValueError, RecursionError, OverflowError) as fault:
            raise BadEntry(f"not a usage event: {fault}"[:MAX_NOTE_TEXT]) from fault


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def clean_text(text: str) -> str:
    """NUL and lone surrogates, which Postgres cannot hold, as U+FFFD."""
    return "".join(_REPLACEMENT if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in text)


def _checked(event: UsageEvent, now: datetime) -> UsageEvent:
    for name in ("charged_nano_usd", "cost_nano_usd"):
        if not 0 <= getattr(event, name) <= MAX_AMOUNT:
            raise BadEntry(f"{name} is {getattr(event, name)}, out of range")
    for name in ("prompt_tokens", "completion_tokens"):
        if not 0 <= getattr(event, name) <= MAX_TOKENS:
            raise BadEntry(f"{name} is {getattr(event, name)}, out of range")
    if event.admitted_at.tzinfo is None:
        raise BadEntry("admitted_at has no time zone")
    if not EARLIEST <= event.admitted_at <= now + LATEST_AHEAD:
        raise BadEntry(f"admitted_at is {event.admitted_at.isoformat()}, out of range")
    changes: dict[str, Any] = {}
    for name in ("key_id", "route"):
        text: str = getattr(event, name)
        if not 0 < len(text) <= MAX_KEY_TEXT:
            raise BadEntry(f"{name} has {len(text)} characters, out of range")
        if "\0" in text:
            changes[name] = clean_text(text)
    # What only explains must not keep money out of the ledger.
    for name, longest in NOTES.items():
        note: str | None = getattr(event, name)
        if note is not None and ("\0" in note or len(note) > longest):
            changes[name] = clean_text(note[:longest])
    for name in ("first_token_ms", "total_ms", "queue_ms"):
        duration: int | None = getattr(event, name)
        if duration is not None and not 0 <= duration <= MAX_MS:
            changes[name] = None
    for name, (least, most) in RANGES.items():
        value: int = getattr(event, name)
        if not least <= value <= most:
            changes[name] = min(max(value, least), most)
    if event.tags and (tags := _tags(event.tags)) != event.tags:
        changes["tags"] = tags
    failed = [clean_text(attempt[:MAX_ATTEMPT_TEXT]) for attempt in event.failed_attempts[:MAX_ATTEMPTS]]
    if failed != event.failed_attempts:
        changes["failed_attempts"] = failed
    return msgspec.structs.replace(event, **changes) if changes else event


def _tags(tags: list[str]) -> list[str]:
    """Sorted, each once, none empty, as many and as long as a row may hold."""
    return sorted({clean_text(tag[:MAX_TAG_TEXT]) for tag in tags if tag})[:MAX_TAGS]
