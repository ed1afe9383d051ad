"""Settlements on their way to Redis: sent at once, repeated until they land, kept a while in case Redis forgets.

Those that Redis does not take at the first attempt are written to a spool on disk, too, so that they survive a gateway
that dies while Redis is away; the next gateway on this host settles them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

from gateway.admission.redis import Argument, RedisClient, RedisUnavailable
from gateway.admission.scripts import SETTLE
from gateway.admission.spool import Spool
from gateway.admission.spool_file import Record
from gateway.clock import Clock

log = logging.getLogger(__name__)

_KEPT_S = 5.0
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_REPEATED_AT_ONCE = 64
_ADOPTION_S = 10.0
_DISK_PATIENCE_S = 0.15
"""How long a request's end waits for the spool, so that a disk that hangs holds up no answer."""


class Settlement:
    """One call of the settle script. ``attempted`` is done when the first attempt has ended well; or else when the
    settlement is on disk, or the disk does not take it in time."""

    __slots__ = ("_redis", "arguments", "attempted", "keys", "landed_at", "request_id", "shard")

    def __init__(
        self, redis: RedisClient, request_id: UUID, shard: str, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> None:
        self._redis = redis
        self.request_id = request_id
        self.shard = shard
        self.keys = keys
        self.arguments = arguments
        self.attempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.landed_at = 0.0

    async def sent(self) -> None:
        """Wait until it is on its way to Redis; while that is away or hangs, as for ``attempted``.

        What is asked on another connection a moment later may still come before it.
        """
        if not (self.attempted.done() or await self._redis.flushed(self.keys[0])):
            await asyncio.shield(self.attempted)

    def record(self) -> Record:
        return Record(self.request_id, self.shard, list(self.keys), list(self.arguments))

    def end_attempt(self, _: object = None) -> None:
        if not self.attempted.done():
            self.attempted.set_result(None)

    def limit_attempt(self, patience_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(patience_s, self.end_attempt)
        self.attempted.add_done_callback(lambda _: timer.cancel())


class Settlements:
    """``limit``: most settlements that may wait; ``full`` then keeps new requests out. ``spool``: None keeps those that
    fail in memory alone."""

    def __init__(self, redis: RedisClient, clock: Clock, *, limit: int, spool: Spool | None = None) -> None:
        self._redis = redis
        self._clock = clock
        self._limit = limit
        self._spool = spool
        self._pending: dict[UUID, Settlement] = {}
        self._failed: dict[UUID, Settlement] = {}
        self._landed: deque[Settlement] = deque()
        self._failing = asyncio.Event()
        self._back = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def full(self) -> bool:
        return len(self._pending) >= self._limit

    @property
    def waiting(self) -> int:
        """How many have not landed."""
        return len(self._pending)

    @property
    def unsafe(self) -> int:
        """How many of them end with this process."""
        return self.waiting - (self._spool.safe if self._spool is not None else 0)

    def submit(self, settlement: Settlement) -> None:
        self._pending[settlement.request_id] = settlement
        self._empty.clear()
        self._attempt(settlement)

    def retry_now(self) -> None:
        """Redis is back: do not wait for the next turn."""
        self._back.set()

    def resend(self, shard: str | None = None) -> None:
        """Send again what landed in the last seconds (of one shard or of all): Redis may have lost it."""
        self._forget_old()
        kept, self._landed = self._landed, deque()
        for settlement in kept:
            if shard is None or settlement.shard == shard:
                self.submit(settlement)
            else:
                self._landed.append(settlement)

    def recent_shards(self) -> set[str]:
        self._forget_old()
        return {settlement.shard for settlement in self._landed}

    async def run(self) -> None:
        """Repeat what failed, and settle what gateways that ended left on this host's disk, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat_failed())
            if self._spool is not None:
                tasks.create_task(self._adopt(self._spool))

    async def _adopt(self, spool: Spool) -> None:
        while True:
            try:
                await spool.replay(self._replay)
            except OSError as fault:
                log.error("the spool of settlements cannot be read: %s", fault)
            except Exception:
                log.exception("the spool of settlements cannot be replayed; it is tried again")
            await asyncio.sleep(_ADOPTION_S)

    def _replay(self, record: Record) -> asyncio.Future[Any]:
        return self._redis.run(SETTLE, record.keys, record.arguments)

    async def _repeat_failed(self) -> None:
        wait = _FIRST_WAIT_S
        while True:
            await self._failing.wait()
            try:
                async with asyncio.timeout(wait):
                    await self._back.wait()
            except TimeoutError:
                wait = min(wait * 2, _LONGEST_WAIT_S)
            self._back.clear()
            self._failing.clear()
            failed, self._failed = self._failed, {}
            shards: dict[str, list[Settlement]] = {}
            for settlement in failed.values():
                shards.setdefault(settlement.shard, []).append(settlement)
            await asyncio.gather(*map(self._repeat_shard, shards.values()))
            if not self._failed:
                wait = _FIRST_WAIT_S

    async def _repeat_shard(self, waiting: list[Settlement]) -> None:
        """A few at a time for as long as Redis takes some: a long queue must not keep this process busy in vain."""
        for at in range(0, len(waiting), _REPEATED_AT_ONCE):
            batch = waiting[at : at + _REPEATED_AT_ONCE]
            attempts = [self._attempt(settlement) for settlement in batch]
            await asyncio.wait(attempts)
            if all(isinstance(attempt.exception(), RedisUnavailable) for attempt in attempts):
                for settlement in waiting[at + len(batch) :]:
                    self._failed[settlement.request_id] = settlement
                self._failing.set()
                return

    async def drained(self) -> None:
        """Wait until none is pending."""
        await self._empty.wait()

    def _attempt(self, settlement: Settlement) -> asyncio.Future[Any]:
        future = self._redis.run(SETTLE, settlement.keys, settlement.arguments)
        future.add_done_callback(partial(self._ended, settlement))
        return future

    def _ended(self, settlement: Settlement, future: asyncio.Future[Any]) -> None:
        fault = future.exception()
        if fault is None:
            settlement.end_attempt()
            if self._spool is not None:
                self._spool.landed(settlement.request_id)
            del self._pending[settlement.request_id]
            if not self._pending:
                self._empty.set()
            settlement.landed_at = now = self._clock.monotonic()
            self._landed.append(settlement)
            self._forget_old(now)
            return
        if not isinstance(fault, RedisUnavailable):
            log.error("Redis refuses the settlement of %s; it is tried again: %s", settlement.request_id, fault)
        self._failed[settlement.request_id] = settlement
        self._failing.set()
        if self._spool is None:
            settlement.end_attempt()
        else:
            kept = self._spool.keep(settlement.record())
            if not settlement.attempted.done():
                kept.add_done_callback(settlement.end_attempt)
                settlement.limit_attempt(_DISK_PATIENCE_S)

    def _forget_old(self, now: float | None = None) -> None:
        horizon = (self._clock.monotonic() if now is None else now) - _KEPT_S
        while self._landed and self._landed[0].landed_at < horizon:
            self._landed.popleft()
