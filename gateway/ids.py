"""Identifiers: UUIDv7, ordered by time (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import time
from uuid import UUID

_MS = (1 << 48) - 1
_VERSION_AND_VARIANT = 0x7 << 76 | 0x2 << 62
_RANDOM = (1 << 76) - 1 & ~(0x3 << 62)


def uuid7(unix_ms: int | None = None) -> UUID:
    """A new UUIDv7. ``unix_ms``: milliseconds since the epoch; now, if not given."""
    ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random = int.from_bytes(os.urandom(10)) & _RANDOM
    return UUID(int=(ms & _MS) << 80 | _VERSION_AND_VARIANT | random)
