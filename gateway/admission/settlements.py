"""Settlements on their way to Redis: sent at once, repeated until they land, kept a while in case Redis forgets.

They wait in memory, so a gateway that dies while Redis is away loses those that have not landed; the janitor then
settles these requests as abandoned, with the usage last checkpointed. A local spool belongs into ``submit``, written
and synced before the first attempt and replayed by ``run`` at its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

from gateway.admission.redis import Argument, PipelinedRedis, RedisUnavailable, load_script
from gateway.clock import Clock

log = logging.getLogger(__name__)

SETTLE = load_script("settle")
_KEPT_S = 5.0
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0


class Settlement:
    """One call of the settle script. ``attempted`` is done when the first attempt has ended, well or not."""

    __slots__ = ("arguments", "attempted", "keys", "landed_at", "request_id", "shard")

    def __init__(self, request_id: UUID, shard: str, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        self.request_id = request_id
        self.shard = shard
        self.keys = keys
        self.arguments = arguments
        self.attempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.landed_at = 0.0


class Settlements:
    """``limit``: most settlements that may wait; ``full`` then keeps new requests out."""

    def __init__(self, redis: PipelinedRedis, clock: Clock, *, limit: int) -> None:
        self._redis = redis
        self._clock = clock
        self._limit = limit
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
        """Repeat what failed, for ever."""
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
            if failed:
                await asyncio.wait([self._attempt(settlement) for settlement in failed.values()])
            if not self._failed:
                wait = _FIRST_WAIT_S

    async def drained(self) -> None:
        """Wait until none is pending."""
        await self._empty.wait()

    def _attempt(self, settlement: Settlement) -> asyncio.Future[Any]:
        future = self._redis.run(SETTLE, settlement.keys, settlement.arguments)
        future.add_done_callback(partial(self._ended, settlement))
        return future

    def _ended(self, settlement: Settlement, future: asyncio.Future[Any]) -> None:
        fault = future.exception()
        if not settlement.attempted.done():
            settlement.attempted.set_result(None)
        if fault is None:
            del self._pending[settlement.request_id]
            if not self._pending:
                self._empty.set()
            settlement.landed_at = self._clock.monotonic()
            self._landed.append(settlement)
            self._forget_old()
            return
        if not isinstance(fault, RedisUnavailable):
            log.error("Redis refuses the settlement of %s; it is tried again: %s", settlement.request_id, fault)
        self._failed[settlement.request_id] = settlement
        self._failing.set()

    def _forget_old(self) -> None:
        horizon = self._clock.monotonic() - _KEPT_S
        while self._landed and self._landed[0].landed_at < horizon:
            self._landed.popleft()
