"""Counts of texts that come again and again, such as system prompts."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Final

from gateway.tokens.encoding import Encoding

SHORTEST: Final = 256
"""Characters: a shorter text is counted faster than found."""
ENTRIES: Final = 8192


class CountCache:
    """Bounded, least recently used first. Tenants have entries of their own: none learns what another one sends by how
    long counting takes. Safe to use from several threads."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._counts: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, encoding: Encoding, text: str, tenant: bytes) -> int:
        """``tenant``: at most 64 bytes."""
        if len(text) < SHORTEST:
            return encoding.count(text)
        key = (encoding.name, hashlib.blake2b(text.encode(), digest_size=16, key=tenant).digest())
        with self._lock:
            found = self._counts.get(key)
            if found is not None:
                self._counts.move_to_end(key)
                return found
        found = encoding.count(text)
        with self._lock:
            self._counts[key] = found
            if len(self._counts) > self._entries:
                self._counts.popitem(last=False)
        return found
