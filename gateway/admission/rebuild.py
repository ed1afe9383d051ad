"""Building counters that Redis lacks: from the ledger, from events on their way to it, from what open requests hold."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

import msgspec

from gateway.admission import keys
from gateway.admission.periods import Period, from_ms, to_ms
from gateway.admission.plan import BUCKETS, Counter, bucket_ms
from gateway.admission.redis import RedisClient, RedisError, RedisUnavailable
from gateway.admission.scripts import REBUILD, RECOUNT
from gateway.admission.ticket import MAX_AMOUNT
from gateway.billing.usage import UsageEvent
from gateway.tenants.principal import Limit, Subject

_PAGE = 1000
_ATTEMPTS = 10
_NO_ENTRY = "0-0"
_decoder = msgspec.json.Decoder(UsageEvent)


class LedgerSums(Protocol):
    """Sums over the ledger's rows of a tenant: of those that ``subject`` and ``target`` name, but not of the requests
    in ``excluding``. As a limit has them: '' for the tenant, a project's id, a key's public id, a route, a hash."""

    async def charged(
        self,
        tenant_id: UUID,
        start: datetime,
        end: datetime,
        *,
        subject: Subject,
        target: str,
        excluding: Collection[UUID],
    ) -> int:
        """Nano-USD charged for requests with ``start`` <= admitted_at < ``end``."""
        ...

    async def used(
        self,
        tenant_id: UUID,
        since: datetime,
        *,
        width_s: int,
        subject: Subject,
        target: str,
        excluding: Collection[UUID],
    ) -> Sequence[tuple[int, int, int]]:
        """What was admitted from ``since`` on, by bucket: its number (Unix seconds over ``width_s``), requests that
        were not given back, tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Undrained:
    """A tenant's events that wait in the stream, by request, up to the stream's entry ``last``."""

    last: str
    events: dict[UUID, UsageEvent]


class Rebuilding:
    """Builds counters; callers who miss the same one at the same time share one reading of the ledger."""

    def __init__(self, redis: RedisClient, ledger: LedgerSums) -> None:
        self._redis = redis
        self._ledger = ledger
        self._running: dict[tuple[UUID, Counter], asyncio.Future[None]] = {}

    async def build(
        self, tenant_id: UUID, counter: Counter, limit: Limit, period: Period | None, now: datetime
    ) -> None:
        """``counter``: a budget, requests or tokens. ``limit``: for which it is kept. ``period``: the budget's.

        Raises RedisUnavailable, and what the ledger raises."""
        running = self._running.get((tenant_id, counter))
        if running is not None:
            await asyncio.shield(running)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[tenant_id, counter] = done
        try:
            await self._build(tenant_id, counter, limit, period, now)
        except Exception as fault:
            done.set_exception(fault)
            done.exception()  # it is raised here in any case; those who wait may be none
            raise
        finally:
            del self._running[tenant_id, counter]
            if not done.done():  # done, or cancelled: those who wait ask Redis again, and see
                done.set_result(None)

    async def recount(self, tenant_id: UUID, limit: Limit) -> None:
        """Count who holds the slots of a limit on concurrent requests. Raises RedisUnavailable."""
        spelled = keys.of_tenant(tenant_id)
        await self._redis.run(
            RECOUNT, (spelled.tenant, spelled.live), (spelled.prefix, str(Counter.of(limit)), str(limit.id))
        )

    async def _build(
        self, tenant_id: UUID, counter: Counter, limit: Limit, period: Period | None, now: datetime
    ) -> None:
        """An event may move from the stream to the ledger at any moment. So the ledger is asked without the requests
        found in the stream; events later than those are added by the script, which takes nothing if some of them have
        left the stream already."""
        spelled = keys.of_tenant(tenant_id)
        for _ in range(_ATTEMPTS):
            epoch = await self._redis.command("GET", spelled.epoch)
            if epoch is None:
                return
            undrained = await read_undrained(self._redis, tenant_id)
            if period is not None:
                tail: tuple[bytes | int, ...] = (
                    to_ms(period.start),
                    to_ms(period.end),
                    await self._charged(tenant_id, counter, period, undrained),
                )
            else:
                tail = (b"", b"", await self._used(tenant_id, counter, now, undrained))
            reply = await self._redis.run(
                REBUILD,
                (spelled.tenant, spelled.live, spelled.usage, spelled.epoch),
                (
                    self._redis.time_offset_ms,
                    spelled.prefix,
                    spelled.id,
                    str(counter),
                    epoch,
                    undrained.last,
                    *tail,
                    str(limit.id),
                ),
            )
            if reply[0] != b"CHANGED":
                return
        raise RedisUnavailable("a limit could not be counted while requests kept ending")

    async def _charged(self, tenant_id: UUID, counter: Counter, period: Period, undrained: Undrained) -> int:
        total = await self._ledger.charged(
            tenant_id,
            period.start,
            period.end,
            subject=counter.subject,
            target=counter.target,
            excluding=undrained.events.keys(),
        )
        total += sum(
            event.charged_nano_usd
            for event in undrained.events.values()
            if period.holds(event.admitted_at) and counted(counter, event)
        )
        # A sum beyond what Redis counts exactly is beyond every budget, too.
        return min(total, MAX_AMOUNT)

    async def _used(self, tenant_id: UUID, counter: Counter, now: datetime, undrained: Undrained) -> bytes:
        width = bucket_ms(str(counter.window))
        first = to_ms(now) // width - BUCKETS - 1  # one more, for the time that passes
        sums: dict[int, int] = {}
        rows = await self._ledger.used(
            tenant_id,
            from_ms(first * width),
            width_s=width // 1000,
            subject=counter.subject,
            target=counter.target,
            excluding=undrained.events.keys(),
        )
        tokens = counter.metric == "tokens"
        for bucket, requests, used in rows:
            sums[bucket] = sums.get(bucket, 0) + (used if tokens else requests)
        for event in undrained.events.values():
            bucket = to_ms(event.admitted_at) // width
            if bucket >= first and counted(counter, event):
                sums[bucket] = sums.get(bucket, 0) + (tokens_of(event) if tokens else requests_of(event))
        flat = [number for bucket, amount in sums.items() for number in (bucket, min(amount, MAX_AMOUNT))]
        return msgspec.msgpack.encode(flat)


def counted(counter: Counter, event: UsageEvent) -> bool:
    """Whether the counter counts the event's request."""
    match counter.subject:
        case "tenant":
            return True
        case "project":
            return str(event.project_id) == counter.target
        case "key":
            return event.key_id == counter.target
        case "model":
            return event.route == counter.target
        case "end_user":
            return event.end_user == counter.target


def tokens_of(event: UsageEvent) -> int:
    """What a settled request uses up of a limit on tokens."""
    return event.prompt_tokens + event.completion_tokens


def requests_of(event: UsageEvent) -> int:
    """What a settled request uses up of a limit on requests: nothing, if it failed before any backend was tried."""
    return 0 if event.status == "failed" and event.attempts == 0 else 1


async def read_undrained(redis: RedisClient, tenant_id: UUID) -> Undrained:
    """The tenant's events in the stream; a later revision replaces the first. Raises RedisUnavailable."""
    key = keys.of_tenant(tenant_id).usage
    last = await _last_entry(redis, key)
    events: dict[UUID, UsageEvent] = {}
    after = "-"
    while last != _NO_ENTRY:
        page = await redis.command("XRANGE", key, after, last, "COUNT", _PAGE)
        for entry_id, fields in page:
            after = "(" + entry_id.decode()
            try:
                event = _decoder.decode(fields[fields.index(b"event") + 1])
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # it will be set aside, and is no row
            if event.tenant_id == tenant_id:
                events[event.request_id] = event
        if len(page) < _PAGE:
            break
    return Undrained(last, events)


async def _last_entry(redis: RedisClient, key: str) -> str:
    try:
        about = await redis.command_at(key, "XINFO", "STREAM", key)
    except RedisError as fault:
        if "no such key" in str(fault):
            return _NO_ENTRY
        raise
    found: bytes = about[about.index(b"last-generated-id") + 1]
    return found.decode()
