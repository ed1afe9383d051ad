"""Moves settled requests from Redis into the ledger, each exactly once, and refusal counts beside them.

Any replica may drain any shard. A lock with a lease keeps two from doing the same work at once; being right does not
hang on it, because writing an entry twice changes nothing. An entry leaves Redis only after its row is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha1
from importlib import resources
from uuid import UUID

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.redis import RedisError, RedisUnavailable, Script, create_redis
from gateway.billing.entries import MAX_KEY_TEXT, BadEntry, Entry, raw_of, read_entry, revision_of
from gateway.billing.ledger import (
    ROW_FAULTS,
    bury,
    cause_of,
    ensure_partition,
    forget_refusal_batches,
    record,
    record_refusals,
)
from gateway.billing.retention import drop_old_months
from gateway.billing.shard_lock import LockLost, ShardLock
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.partitions import month_of, months_ahead
from gateway.ids import uuid7

BATCH = 500
LOCK_LEASE_S = 5.0
WRITE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 2.0
MAINTENANCE_S = 3600.0
MAINTENANCE_RETRY_S = 60.0
MONTHS_AHEAD = 2
SHARDS_AT_ONCE = 4

_log = structlog.get_logger(__name__)
RawEntry = tuple[bytes, Mapping[bytes, bytes]]


def _script(name: str) -> Script:
    source = resources.files("gateway.billing").joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


TAKE_REFUSALS = _script("take_refusals")
FORGET_REFUSALS = _script("forget_refusals")


class Drainer:
    """Drains every shard again and again, until closed."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis_url: str,
        clock: Clock,
        *,
        interval_s: float = 0.5,
        timeout_s: float = 2.0,
        keep_months: int | None = None,
    ) -> None:
        """``timeout_s``: longest wait for an answer of Redis.

        ``keep_months``: whole months of rows that are kept beside the running one; None: all.
        """
        self._engine = engine
        self._clock = clock
        self._interval_s = interval_s
        self._keep_months = keep_months
        self._redis = create_redis(redis_url, timeout_s=timeout_s, name="penstock-drainer")
        self._lanes = asyncio.Semaphore(SHARDS_AT_ONCE)
        self._months: set[datetime] = set()
        self._maintained_at = float("-inf")
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin draining in the background. Needs neither Redis nor Postgres to be there yet."""
        self._stopping.clear()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="drainer")

    async def close(self) -> None:
        """Finish the pass under way, make a last one, and let go of Redis; neither may take longer than two seconds.

        What is not moved by then stays in Redis, for the next start or another replica. The engine stays open: it is
        not ours.
        """
        task, self._task = self._task, None
        self._stopping.set()
        try:
            if task is not None:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await task
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.drain_once()
        except (DatabaseUnavailable, RedisUnavailable, RedisError, LockLost, OSError, TimeoutError) as fault:
            _log.warning("last_drain_failed", error=repr(fault))
        finally:
            await self._redis.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            retention = tasks.create_task(self._drop_old_months(), name="retention")
            await self._drain_until_stopped()
            retention.cancel()

    async def _drop_old_months(self) -> None:
        """Beside the draining, which must not wait while an old month is looked through."""
        while self._keep_months is not None:
            pause = MAINTENANCE_S
            try:
                await drop_old_months(self._engine, self._clock.now(), self._keep_months)
            except DatabaseUnavailable as fault:
                _log.warning("retention_failed", error=str(fault))
                pause = MAINTENANCE_RETRY_S
            except Exception:
                _log.exception("retention_failed")
            await asyncio.sleep(pause)

    async def _drain_until_stopped(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                await self.drain_once()
                if failures:
                    _log.info("drain_recovered", failures=failures)
                failures = 0
            except (DatabaseUnavailable, RedisUnavailable, RedisError, LockLost, OSError) as fault:
                failures += 1
                if failures == 1:
                    _log.warning("drain_failed", error=repr(fault))
            except Exception:
                failures += 1
                _log.exception("drain_failed")
            pause = min(self._interval_s * 2 ** min(failures, 10), max(MAX_BACKOFF_S, self._interval_s))
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def drain_once(self) -> int:
        """Move everything that is there now, except in shards that another replica is draining.

        Returns how many entries left Redis. Raises DatabaseUnavailable, RedisUnavailable, RedisError or LockLost; then
        nothing is lost, what was moved before stays moved, and the shards that could be drained were.
        """
        try:
            await self._maintain()
        except SQLAlchemyError:
            # What it makes ahead, a row that needs it makes for itself.
            _log.exception("maintenance_failed")
            self._maintained_at = self._clock.monotonic() - MAINTENANCE_S + MAINTENANCE_RETRY_S
        found = await asyncio.gather(
            *(
                self._redis.issue("EXISTS", keys.usage(shard), keys.refusals(shard), refusal_batch(shard))
                for shard in keys.ALL_SHARDS
            ),
            return_exceptions=True,
        )
        waiting = [
            shard for shard, number in zip(keys.ALL_SHARDS, found, strict=True) if isinstance(number, int) and number
        ]
        results = await asyncio.gather(*map(self._drain_shard, waiting), return_exceptions=True)
        for result in (*results, *found):
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def _drain_shard(self, shard: str) -> int:
        async with self._lanes:
            lock = ShardLock(self._redis, f"{shard}:drainer", lease_s=LOCK_LEASE_S)
            if not await lock.acquire():
                return 0
            try:
                drained = await self._drain_events(shard, lock)
                await self._drain_refusals(shard)
                return drained
            finally:
                await lock.release()

    async def _drain_events(self, shard: str, lock: ShardLock) -> int:
        drained = 0
        while batch := await self._read(shard):
            await self._write(shard, batch)
            drained += await self._acknowledge(shard, batch)
            if len(batch) < BATCH:
                break
            await lock.extend()
        return drained

    async def _read(self, shard: str) -> list[RawEntry]:
        entries = await self._redis.command("XRANGE", keys.usage(shard), "-", "+", "COUNT", BATCH)
        return [(entry_id, dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]

    async def _acknowledge(self, shard: str, batch: list[RawEntry]) -> int:
        return int(await self._redis.command("XDEL", keys.usage(shard), *(entry_id for entry_id, _ in batch)))

    async def _write(self, shard: str, batch: list[RawEntry]) -> None:
        entries: list[Entry] = []
        for entry_id, fields in batch:
            try:
                entries.append(read_entry(entry_id.decode(), fields, self._clock.now()))
            except BadEntry as fault:
                await self._bury(shard, entry_id.decode(), raw_of(fields), revision_of(fields), str(fault))
        try:
            await self._record(entries)
        except ROW_FAULTS as fault:
            # Some row of it will not go in. Which one is found by trying them one at a time.
            _log.warning("batch_refused", shard=shard, entries=len(entries), error=cause_of(fault))
            self._months.clear()
            for entry in entries:
                try:
                    await self._record([entry])
                except ROW_FAULTS as own:
                    await self._bury(shard, entry.id, entry.raw, entry.revision, cause_of(own))

    async def _record(self, entries: list[Entry]) -> None:
        for month in sorted({month_of(entry.event.admitted_at) for entry in entries} - self._months):
            await self._ensure_partition(month)
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await record(connection, entries)

    async def _bury(self, shard: str, entry_id: str, raw: bytes, revision: int | None, error: str) -> None:
        _log.error("usage_event_set_aside", shard=shard, entry_id=entry_id, error=error, table="dead_usage_events")
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await bury(connection, shard, entry_id, raw, revision, error)

    async def _drain_refusals(self, shard: str) -> None:
        flat = await self._redis.run(TAKE_REFUSALS, (keys.refusals(shard), refusal_batch(shard)), (str(uuid7()),))
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        if not fields:
            return
        batch = fields.pop(b"batch").decode()
        counts: dict[tuple[datetime, UUID, str, str], int] = {}
        for field, value in fields.items():
            try:
                key = refusal_key(field.decode())
                counts[key] = counts.get(key, 0) + int(value)
            except ValueError as fault:
                _log.error("refusal_count_set_aside", shard=shard, field=repr(field[:500]), error=repr(fault))
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await record_refusals(connection, UUID(batch), counts)
        await self._forget_refusals(shard, batch)

    async def _forget_refusals(self, shard: str, batch: str) -> None:
        await self._redis.run(FORGET_REFUSALS, (refusal_batch(shard),), (batch,))

    async def _maintain(self) -> None:
        """Once an hour: partitions for the months to come, and no marks of batches long forgotten."""
        if self._clock.monotonic() - self._maintained_at < MAINTENANCE_S:
            return
        for month in months_ahead(self._clock.now(), MONTHS_AHEAD):
            await self._ensure_partition(month)
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await forget_refusal_batches(connection)
        self._maintained_at = self._clock.monotonic()

    async def _ensure_partition(self, month: datetime) -> None:
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await ensure_partition(connection, month)
        self._months.add(month)


def refusal_batch(shard: str) -> str:
    return f"{shard}:refusals:batch"


def refusal_key(field: str) -> tuple[datetime, UUID, str, str]:
    """``tenant id|key id|reason|begin of the quarter hour in Unix seconds``. Raises ValueError."""
    tenant_id, key_id, reason, begin = field.split("|")
    if max(len(key_id), len(reason)) > MAX_KEY_TEXT or "\0" in field:
        raise ValueError("a part is too long or holds NUL")
    if not (begin.isascii() and begin.isdigit() and len(begin) <= 10):
        raise ValueError("the quarter hour is not a number of seconds")
    return datetime.fromtimestamp(int(begin), UTC), UUID(tenant_id), key_id, reason
