"""Where the pipeline drops what is to be logged: a bounded queue, and one task that redacts, seals and writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeVar
from uuid import UUID

import structlog

from gateway.admission.redis import RedisClient, RedisUnavailable
from gateway.clock import Clock
from gateway.datakeys.data_key import DataKey
from gateway.datakeys.service import DataKeys
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.entry import Entry
from gateway.promptlog.sealing import LOOP_BYTES, MakeRedactor, NotRedacted, Packed, pack, remembered, shortened
from gateway.promptlog.store import LATEST, Store
from gateway.telemetry import Sampler

Lost = Literal["queue_full", "too_late", "keys", "redaction", "redis", "fault", "stopped"]
"""Why an entry was not written: more came than could be held; the request was admitted longer than a day ago; no data
key could be had from Postgres; it could not be redacted; Redis is away, hangs or is full; a fault of ours; the gateway
stopped before."""

MOST_ENTRIES: Final = 10_000
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of one process' queue. One tenant may have half of it."""
ENTRY_BYTES: Final = 2048
"""What an entry takes beside its bodies, about."""
BATCH_ENTRIES: Final = 256
BATCH_BYTES: Final = 8 * 1024 * 1024
CALL_ENTRIES: Final = 64
CALL_BYTES: Final = 2 * 1024 * 1024
"""Of one call to Redis, unless one entry has more."""
RETRIES_S: Final = (0.1, 0.5)
KEY_RETRY_S: Final = 1.1
"""Longer than the data keys' own pause in asking Postgres."""
STOP_S: Final = 5.0

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class _Queued(NamedTuple):
    policy: PromptLogPolicy
    entry: Entry
    size: int

    @property
    def owner(self) -> tuple[UUID, str | None]:
        return self.entry.tenant_id, self.entry.end_user


class _Call(NamedTuple):
    tenant_id: UUID
    policy: PromptLogPolicy
    entries: list[Packed]


class PromptLog:
    """One per gateway process. Use as an async context manager around the time in which requests are served.

    ``redis``: a connection of its own, for entries are long, and what is asked of it comes in order. ``lost`` is told
    why entries were not written, and how many.
    """

    def __init__(
        self,
        redis: RedisClient,
        data_keys: DataKeys,
        clock: Clock,
        make_redactor: MakeRedactor,
        *,
        lost: Callable[[Lost, int], None] = lambda _reason, _count: None,
    ) -> None:
        self._store = Store(redis)
        self._redis = redis
        self._data_keys = data_keys
        self._clock = clock
        self._make_redactor = remembered(make_redactor)
        self._lost = lost
        self._queue: deque[_Queued] = deque()
        self._bytes = 0
        self._bytes_of: Counter[UUID] = Counter()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._failing = False
        self._keyless = False
        """The last try failed, at Redis or at Postgres: the next is not repeated, for others wait behind it."""
        self._told = Sampler(clock)

    async def __aenter__(self) -> PromptLog:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prompt-log")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is in the queue has a few seconds to be written."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._idle.wait()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._queue:
            self._lose("stopped", len(self._queue))
            self._queue.clear()
        self._idle.set()
        await self._redis.close()

    def record(self, policy: PromptLogPolicy, entry: Entry) -> None:
        """Log the request as ``policy`` has it. It neither waits nor raises; what cannot be held is counted as lost.

        Bodies come as they are: what of them is too long is cut here, after it was redacted.
        """
        if policy.level == "off":
            return
        entry = shortened(entry, policy)
        size = ENTRY_BYTES + len(entry.request) + len(entry.response)
        if entry.admitted_at < self._clock.now() - LATEST:
            self._lose("too_late", 1)
        elif (
            self._closing
            or len(self._queue) >= MOST_ENTRIES
            or self._bytes + size > MOST_BYTES
            or self._bytes_of[entry.tenant_id] + size > MOST_BYTES // 2
        ):
            self._lose("stopped" if self._closing else "queue_full", 1)
        else:
            self._queue.append(_Queued(policy, entry, size))
            self._bytes += size
            self._bytes_of[entry.tenant_id] += size
            self._idle.clear()
            self._news.set()

    async def flush(self) -> None:
        """Wait until all that was recorded is written, or lost."""
        await self._idle.wait()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while batch := self._take():
                try:
                    await self._write(batch)
                except asyncio.CancelledError:
                    self._lose("stopped", len(batch))
                    raise
                except Exception as fault:
                    # Its kind alone, for its text might hold some of a body.
                    _log.error("prompt_log_failed", error=type(fault).__name__)
                    self._lose("fault", len(batch))
                finally:
                    self._let_go(batch)
            self._idle.set()

    def _take(self) -> list[_Queued]:
        batch: list[_Queued] = []
        size = 0
        while self._queue and len(batch) < BATCH_ENTRIES and (not batch or size + self._queue[0].size <= BATCH_BYTES):
            size += self._queue[0].size
            batch.append(self._queue.popleft())
        return batch

    def _let_go(self, batch: Iterable[_Queued]) -> None:
        for queued in batch:
            self._bytes -= queued.size
            tenant_id = queued.entry.tenant_id
            self._bytes_of[tenant_id] -= queued.size
            if not self._bytes_of[tenant_id]:
                del self._bytes_of[tenant_id]

    async def _write(self, batch: Sequence[_Queued]) -> None:
        keys = await self._keys({queued.owner for queued in batch})
        sealable = [queued for queued in batch if queued.owner in keys]
        self._lose("keys", len(batch) - len(sealable))
        size = sum(queued.size - ENTRY_BYTES for queued in sealable)
        if size < LOOP_BYTES:
            calls, lost = self._pack(sealable, keys)
        else:
            calls, lost = await asyncio.to_thread(self._pack, sealable, keys)
        for reason, count in lost.items():
            self._lose(reason, count)
        for delay in (*RETRIES_S, None):
            calls = await self._send(calls)
            if not calls:
                self._failing = False
                return
            if delay is None or self._failing or self._closing:
                break
            await asyncio.sleep(delay)
        self._failing = True
        self._lose("redis", sum(len(call.entries) for call in calls))

    async def _keys(self, owners: set[tuple[UUID, str | None]]) -> dict[tuple[UUID, str | None], DataKey]:
        """Of those whose key can be had."""
        found = await self._data_keys.keys(owners)
        if len(found) < len(owners) and not (self._keyless or self._closing):
            await asyncio.sleep(KEY_RETRY_S)
            found |= await self._data_keys.keys(owners - found.keys())
        self._keyless = len(found) < len(owners)
        return found

    def _pack(
        self, batch: Iterable[_Queued], keys: dict[tuple[UUID, str | None], DataKey]
    ) -> tuple[list[_Call], Counter[Lost]]:
        """And what could not be packed."""
        calls: list[_Call] = []
        lost: Counter[Lost] = Counter()
        open_calls: dict[UUID, tuple[_Call, int]] = {}
        for queued in batch:
            tenant_id = queued.entry.tenant_id
            try:
                packed = pack(queued.entry, queued.policy, keys[queued.owner], self._make_redactor)
            except Exception as fault:
                redaction = isinstance(fault, NotRedacted)
                lost["redaction" if redaction else "fault"] += 1
                # Without the text of a fault that is not ours: it might hold some of a body.
                told = str(fault) if redaction else type(fault).__name__
                _log.error("prompt_not_packed", request_id=str(queued.entry.request_id), error=told)
                continue
            size = len(packed.metadata) + len(packed.request) + len(packed.response)
            call, before = open_calls.get(tenant_id, (None, 0))
            if call is None or len(call.entries) == CALL_ENTRIES or before + size > CALL_BYTES:
                call, before = _Call(tenant_id, queued.policy, []), 0
                calls.append(call)
            call.entries.append(packed)
            open_calls[tenant_id] = call, before + size
        return calls, lost

    async def _send(self, calls: Sequence[_Call]) -> list[_Call]:
        """Those that failed. What was written though its answer was lost is not written twice."""
        appended = await asyncio.gather(
            *(self._store.append(call.tenant_id, call.policy, call.entries) for call in calls), return_exceptions=True
        )
        failed = []
        for call, outcome in zip(calls, appended, strict=True):
            if isinstance(outcome, RedisUnavailable):
                failed.append(call)
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    def _lose(self, reason: Lost, count: int) -> None:
        if not count:
            return
        self._lost(reason, count)
        if (times := self._told.take(reason)) is not None:
            _log.warning("prompt_log_entries_lost", reason=reason, times=times)
