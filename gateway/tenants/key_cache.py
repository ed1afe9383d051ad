"""Keys read from Postgres, kept for a few seconds; look-ups of keys nobody has seen are few at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from gateway.clock import Clock
from gateway.db.cached import ask_again_at
from gateway.db.engine import DatabaseUnavailable

P = TypeVar("P")

MAX_KNOWN = 10_000
MAX_UNKNOWN = 10_000
UNKNOWN_LANES = 2
MAX_QUEUED = 200
MAX_AWAY_S = 3600.0
"""How long a key that was good goes on being good while Postgres is away. Nothing can be revoked there meanwhile; and
what was, and announced, is noticed at admission and read anew."""
ASKING_S = 3.0
"""While Postgres is away, so long others do not wait for it beside the one that asks."""


@dataclass(frozen=True, slots=True)
class StoredKey(Generic[P]):
    """A key as Postgres has it: not revoked when it was read."""

    principal: P
    secret_sha256: bytes
    expires_at: datetime | None
    generation: int
    previous_secret_sha256: bytes | None = None
    previous_until: datetime | None = None
    """Until then the secret before the last rotation is good, too."""


@dataclass(slots=True)
class _Read(Generic[P]):
    """A look-up under way. ``finished`` stays False when whoever ran it was cancelled."""

    number: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    key: StoredKey[P] | None = None
    fault: DatabaseUnavailable | None = None


class KeyCache(Generic[P]):
    """Public id -> stored key.

    An id that was good before is read again without waiting for ids that never were: a flood of made-up keys takes
    ``UNKNOWN_LANES`` connections at most, and past ``MAX_QUEUED`` waiting it is turned away. Both maps are bounded.
    """

    def __init__(self, clock: Clock, read: Callable[[str], Awaitable[StoredKey[P] | None]], *, cache_s: float) -> None:
        self._clock = clock
        self._read = read
        self._cache_s = cache_s
        self._known: OrderedDict[str, tuple[float, StoredKey[P]]] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._reads: dict[str, _Read[P]] = {}
        self._away = False
        self._ask_again_at = float("-inf")
        self._count = 0
        self._forgotten = 0
        """How many reads had begun when something was forgotten last: what they find may be old."""
        self._lanes = asyncio.Semaphore(UNKNOWN_LANES)
        self._queued = 0

    async def get(self, public_id: str, *, or_old: bool = False) -> StoredKey[P] | None:
        """The key, at most ``cache_s`` old; with ``or_old`` older, while Postgres is away; None: unknown, revoked or
        expired.

        ``or_old`` is for who notices a revocation in another way. Raises DatabaseUnavailable.
        """
        fresh, key = self._cached(public_id)
        if not fresh:
            read = self._read_or_old(public_id) if or_old else self._look_up(public_id, begun_after=self._forgotten)
            key = await read
        return self._alive(key)

    async def _read_or_old(self, public_id: str) -> StoredKey[P] | None:
        old = self._old(public_id)
        began = self._clock.monotonic()
        if old is not None and began < self._ask_again_at:
            return old
        if self._away:
            self._ask_again_at = began + ASKING_S
        try:
            key = await self._look_up(public_id, begun_after=self._forgotten)
            self._away, self._ask_again_at = False, float("-inf")
            return key
        except DatabaseUnavailable:
            old = self._old(public_id)  # it may have been forgotten meanwhile
            if old is None:
                raise
            self._away, self._ask_again_at = True, ask_again_at(began, self._clock.monotonic())
            return old

    def _old(self, public_id: str) -> StoredKey[P] | None:
        read_at, key = self._known.get(public_id, (float("-inf"), None))
        return key if self._clock.monotonic() - read_at <= MAX_AWAY_S else None

    async def reload(self, public_id: str, *, at_least: int | None = None) -> StoredKey[P] | None:
        """The key as Postgres has it now, or a cached one of the generation ``at_least`` or above."""
        if at_least is not None:
            fresh, key = self._cached(public_id)
            if fresh and key is not None and key.generation >= at_least:
                return self._alive(key)
        return self._alive(await self._look_up(public_id, begun_after=self._count))

    def forget(self, public_id: str) -> None:
        """The next ``get`` reads it anew."""
        self._forgotten = self._count
        if known := self._known.get(public_id):
            self._known[public_id] = (float("-inf"), known[1])
        self._unknown.pop(public_id, None)

    def forget_tenant(self, belongs: Callable[[P], bool]) -> None:
        """As ``forget``, for every key whose principal satisfies ``belongs``."""
        self._forgotten = self._count
        for public_id, (_, key) in list(self._known.items()):
            if belongs(key.principal):
                self.forget(public_id)

    def _cached(self, public_id: str) -> tuple[bool, StoredKey[P] | None]:
        oldest = self._clock.monotonic() - self._cache_s
        if (known := self._known.get(public_id)) and known[0] > oldest:
            return True, known[1]
        read_at = self._unknown.get(public_id)
        return read_at is not None and read_at > oldest, None

    def _alive(self, key: StoredKey[P] | None) -> StoredKey[P] | None:
        if key is not None and key.expires_at is not None and key.expires_at <= self._clock.now():
            return None
        return key

    async def _look_up(self, public_id: str, *, begun_after: int) -> StoredKey[P] | None:
        """One read at a time for one id. Who comes meanwhile takes its outcome, good or bad, if the read is the
        ``begun_after``-th or a later one."""
        while read := self._reads.get(public_id):
            await read.done.wait()
            if read.fault is not None:
                raise DatabaseUnavailable(str(read.fault)) from read.fault
            if read.finished and read.number > begun_after:
                return read.key
        self._count += 1
        read = self._reads[public_id] = _Read(self._count)
        try:
            read.key = await self._read_and_keep(public_id, read.number)
            read.finished = True
        except DatabaseUnavailable as fault:
            read.fault = fault
            raise
        finally:
            del self._reads[public_id]
            read.done.set()
        return read.key

    async def _read_and_keep(self, public_id: str, number: int) -> StoredKey[P] | None:
        if public_id in self._known:
            return await self._read_now(public_id, number)
        if self._queued >= MAX_QUEUED:
            raise DatabaseUnavailable("too many unknown keys are being looked up; try again shortly")
        self._queued += 1
        try:
            async with self._lanes:
                return await self._read_now(public_id, number)
        finally:
            self._queued -= 1

    async def _read_now(self, public_id: str, number: int) -> StoredKey[P] | None:
        # The age counts from before the read: what changed during it may be missing.
        began = self._clock.monotonic()
        key = await self._read(public_id)
        if number <= self._forgotten:
            began = float("-inf")
        if key is None:
            self._known.pop(public_id, None)
            _put(self._unknown, public_id, began, MAX_UNKNOWN)
        else:
            self._unknown.pop(public_id, None)
            _put(self._known, public_id, (began, key), MAX_KNOWN)
        return key


V = TypeVar("V")


def _put(entries: OrderedDict[str, V], key: str, value: V, limit: int) -> None:
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > limit:
        entries.popitem(last=False)
