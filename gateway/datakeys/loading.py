"""Keys read from Postgres in batches: who asks for the same one shares a reading, and one reading runs at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy.exc import DBAPIError

from gateway.clock import Clock
from gateway.datakeys.data_key import DataKey
from gateway.datakeys.master_keys import UnknownMasterKey
from gateway.db.cached import ask_again_at
from gateway.db.engine import DatabaseUnavailable

CACHE_S: Final = 5.0
MOST_CACHED: Final = 20_000
BATCH: Final = 500
_log = structlog.get_logger(__name__)


class OfOwner(NamedTuple):
    tenant_id: UUID
    end_user: str
    """Empty: the tenant itself."""


class OfId(NamedTuple):
    tenant_id: UUID
    key_id: UUID


Wanted = OfOwner | OfId
Loaded = DataKey | UnknownMasterKey | DatabaseUnavailable | None
"""The key, or why it cannot be had. None: there is none."""


class Loader:
    """``read`` gives a value for each that is wanted; it raises DatabaseUnavailable.

    While Postgres is away nobody waits for it longer than the first who asked: the others are told at once, for as long
    as ``ask_again_at`` has it.
    """

    def __init__(self, read: Callable[[Sequence[Wanted]], Awaitable[dict[Wanted, Loaded]]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._cached: OrderedDict[Wanted, tuple[float, DataKey]] = OrderedDict()
        self._pending: dict[Wanted, asyncio.Future[Loaded]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away_until = float("-inf")
        self._forgotten = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="data-keys")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for slot in list(self._pending):
            self._tell(slot, DatabaseUnavailable("the gateway stops"))

    def forget(self, tenant_id: UUID) -> None:
        """Read that tenant's keys anew, also those that are being read."""
        self._forgotten += 1
        for slot in [slot for slot in self._cached if slot.tenant_id == tenant_id]:
            del self._cached[slot]

    async def get(self, wanted: Iterable[Wanted]) -> dict[Wanted, Loaded]:
        """Raises nothing that Postgres does: each has its own outcome."""
        now = self._clock.monotonic()
        found: dict[Wanted, Loaded] = {}
        waiting: dict[Wanted, asyncio.Future[Loaded]] = {}
        for slot in wanted:
            cached = self._cached.get(slot)
            if cached is not None and now < cached[0]:
                found[slot] = cached[1]
            elif now < self._away_until:
                found[slot] = DatabaseUnavailable("the database did not answer a moment ago; try again shortly")
            else:
                waiting[slot] = self._ask(slot)
        for slot, future in waiting.items():
            # Shielded, for others wait for it too.
            found[slot] = await asyncio.shield(future)
        return found

    def _ask(self, slot: Wanted) -> asyncio.Future[Loaded]:
        if self._task is None:
            raise RuntimeError("DataKeys is an async context manager; enter it first")
        future = self._pending.get(slot)
        if future is None:
            future = self._pending[slot] = asyncio.get_running_loop().create_future()
            self._news.set()
        return future

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while slots := list(self._pending)[:BATCH]:
                try:
                    await self._load(slots)
                except Exception as fault:
                    # Whatever it is, nobody must wait for it for ever. Its text might hold a key.
                    _log.error("data_keys_not_read", error=type(fault).__name__)
                    for slot in slots:
                        self._tell(slot, DatabaseUnavailable("a fault in reading data keys; the log names it"))

    async def _load(self, slots: Sequence[Wanted]) -> None:
        began, forgotten = self._clock.monotonic(), self._forgotten
        values: dict[Wanted, Loaded] = {}
        fault: DatabaseUnavailable | None = None
        try:
            values = await self._read(slots)
        except DatabaseUnavailable as away:
            fault = away
            self._away_until = ask_again_at(began, self._clock.monotonic())
        except DBAPIError as refused:
            if len(slots) > 1:  # one that Postgres refuses must not cost the others theirs
                for slot in slots:
                    await self._load([slot])
                return
            # Without its statement and parameters, which hold the key.
            _log.error("data_key_refused", tenant_id=str(slots[0].tenant_id), error=str(refused.orig))
            fault = DatabaseUnavailable("the database refused a data key; the log says why")
        if fault is None and forgotten != self._forgotten:
            return  # What was read may be erased: once more.
        # All that wait are told at once that Postgres is away, not each batch after a wait of its own.
        for slot in list(self._pending) if began < self._away_until else slots:
            value = values.get(slot) if fault is None else fault
            if isinstance(value, DataKey):
                self._keep(slot, value, began + CACHE_S)
            self._tell(slot, value)

    def _tell(self, slot: Wanted, value: Loaded) -> None:
        future = self._pending.pop(slot, None)
        if future is not None:
            future.set_result(value)

    def _keep(self, slot: Wanted, key: DataKey, until: float) -> None:
        self._cached[slot] = (until, key)
        self._cached.move_to_end(slot)
        while len(self._cached) > MOST_CACHED:
            self._cached.popitem(last=False)
