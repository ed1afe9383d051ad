"""Identifiers: UUIDv7, ordered by time (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import time
from uuid import UUID


def uuid7(unix_ms: int | None = None) -> UUID:
    """A new UUIDv7. ``unix_ms``: milliseconds since the epoch; now, if not given."""
    ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random = int.from_bytes(os.urandom(10))
    value = (ms & ((1 << 48) - 1)) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    return UUID(int=value & ~(0x3 << 62) | 0x2 << 62)
