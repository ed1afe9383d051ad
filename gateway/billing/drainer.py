"""Moves settled requests from Redis into the ledger, each exactly once, and refusal counts beside them.

Any replica may drain any shard. A lock with a lease keeps two from doing the same work at once; being right does not
hang on it, because writing an entry twice changes nothing. An entry leaves Redis only after its row is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha1
from importlib import resources
from uuid import UUID

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.redis import RedisError, RedisUnavailable, Script, create_redis
from gateway.billing.entries import MAX_KEY_TEXT
from gateway.billing.ledger import forget_refusal_batches, record_refusals
from gateway.billing.ledger_writer import WRITE_TIMEOUT_S, LedgerWriter, RawEntry
from gateway.billing.retention import drop_old_months
from gateway.billing.shard_lock import ShardLock
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.partitions import months_ahead
from gateway.ids import uuid7

BATCH = 1000
"""Most entries of all shards together that one transaction writes."""
LOCK_LEASE_S = 5.0
CLOSE_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 2.0
MAINTENANCE_S = 3600.0
MAINTENANCE_RETRY_S = 60.0
MONTHS_AHEAD = 2
REFUSALS_AT_ONCE = 4
"""Each takes a connection of the pool, which others want, too."""

_log = structlog.get_logger(__name__)


def _script(name: str) -> Script:
    source = resources.files("gateway.billing").joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


TAKE_REFUSALS = _script("take_refusals")
FORGET_REFUSALS = _script("forget_refusals")


@dataclass(frozen=True, slots=True)
class _Taken:
    shard: str
    lock: ShardLock
    entries: Sequence[RawEntry]


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
        self._writer = LedgerWriter(engine, clock)
        self._lanes = asyncio.Semaphore(REFUSALS_AT_ONCE)
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
        except (DatabaseUnavailable, RedisUnavailable, RedisError, OSError, TimeoutError) as fault:
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
            except (DatabaseUnavailable, RedisUnavailable, RedisError, OSError) as fault:
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

        Returns how many entries left Redis. Raises DatabaseUnavailable, RedisUnavailable, RedisError or
        SQLAlchemyError; then nothing is lost, what was moved before stays moved, and the shards that could be drained
        were.
        """
        try:
            await self._maintain()
        except SQLAlchemyError:
            # What it makes ahead, a row that needs it makes for itself.
            _log.exception("maintenance_failed")
            self._maintained_at = self._clock.monotonic() - MAINTENANCE_S + MAINTENANCE_RETRY_S
        # A stream that was emptied still exists, so it is asked for its length.
        asked = [self._redis.issue("XLEN", keys.usage(shard)) for shard in keys.ALL_SHARDS]
        asked += [self._redis.issue("EXISTS", keys.refusals(shard), refusal_batch(shard)) for shard in keys.ALL_SHARDS]
        found = await asyncio.gather(*asked, return_exceptions=True)
        faults = [fault for fault in found if isinstance(fault, BaseException)]
        waiting = sorted(
            {
                shard
                for shard, number in zip(keys.ALL_SHARDS * 2, found, strict=True)
                if isinstance(number, int) and number
            }
        )
        drained = 0
        while waiting:
            moved, waiting = await self._drain_round(waiting, faults)
            drained += moved
        if faults:
            raise faults[0]
        return drained

    async def _drain_round(self, shards: Sequence[str], faults: list[BaseException]) -> tuple[int, list[str]]:
        """Move a share of each shard's entries in one batch, so that they share what a transaction costs.

        Adds what was in the way to ``faults``. Returns how many entries left Redis, and where there may be more.
        """
        share = max(BATCH // len(shards), 1)
        taken: list[_Taken] = []
        for result in await asyncio.gather(*(self._take(shard, share) for shard in shards), return_exceptions=True):
            if isinstance(result, BaseException):
                faults.append(result)
            elif result is not None:
                taken.append(result)
        try:
            batch = {each.shard: each.entries for each in taken if each.entries}
            unwritten = await self._writer.write(batch) if batch else {}
            faults += unwritten.values()
            written = [each for each in taken if each.shard not in unwritten]
            results = await asyncio.gather(*(self._finish(each, share) for each in written), return_exceptions=True)
        finally:
            await asyncio.gather(*(each.lock.release() for each in taken))
        drained = 0
        more = []
        for each, left in zip(written, results, strict=True):
            if isinstance(left, BaseException):
                faults.append(left)
                continue
            drained += left
            if len(each.entries) == share:
                more.append(each.shard)
        return drained, more

    async def _take(self, shard: str, most: int) -> _Taken | None:
        """The oldest entries of a shard, and the lock on it; None: another replica drains it."""
        lock = ShardLock(self._redis, f"{shard}:drainer", lease_s=LOCK_LEASE_S)
        if not await lock.acquire():
            return None
        try:
            entries = await self._redis.command("XRANGE", keys.usage(shard), "-", "+", "COUNT", most)
        except BaseException:
            await lock.release()
            raise
        return _Taken(shard, lock, entries)

    async def _finish(self, taken: _Taken, share: int) -> int:
        """What is left to do when the entries are in the ledger; how many of them left Redis."""
        left = await self._acknowledge(taken.shard, taken.entries) if taken.entries else 0
        if len(taken.entries) < share:
            async with self._lanes:
                await self._drain_refusals(taken.shard)
        return left

    async def _acknowledge(self, shard: str, entries: Sequence[RawEntry]) -> int:
        return int(await self._redis.command("XDEL", keys.usage(shard), *[entry_id for entry_id, _ in entries]))

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
            await self._writer.ensure_partition(month)
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await forget_refusal_batches(connection)
        self._maintained_at = self._clock.monotonic()


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
