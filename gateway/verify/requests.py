"""All that Redis holds of requests: reservations and leases that nothing belongs to, and settled ones without a row."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha1
from importlib import resources
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.periods import from_ms
from gateway.admission.redis import RedisClient, Script
from gateway.db.engine import transaction
from gateway.redis_url import asyncio_client
from gateway.verify.difference import Difference, Kind

OVERDUE_MS = 60_000
"""A lease that ran out so long ago should have been swept by some gateway's janitor."""
_BATCH = 1000
_PAGE = 1000
_TIMEOUT_S = 60.0
_SCAN_TIMEOUT_S = 10.0
_PAUSE_S = 1.0
_AROUND = timedelta(days=1)
_REQUEST = re.compile(rb"(\{s\d\d\}):request:([0-9a-f-]{36})")
_ID = re.compile(rb'"request_id":"([0-9a-f-]{36})"')
_MEANINGS: dict[str, tuple[Kind, int, int, str]] = {
    "unreserved": ("lease", 0, 1, "a lease is held for a request that has no reservation"),
    "unleased": ("reservation", 0, 1, "a reservation has no lease, so nobody will ever end it"),
    "slotless": ("slot", 1, 0, "an open request holds no slot of its tenant"),
    "expired": ("lease", 0, 1, "a lease ran out long ago and no gateway has settled its request"),
    "endless": ("tombstone", 0, 1, "a tombstone never expires"),
    "withdrawn": ("lease", 0, 1, "a lease is held for a request that was withdrawn"),
}


def _load() -> Script:
    common = resources.files("gateway.admission").joinpath("common.lua").read_bytes()
    source = b"#!lua\n" + common + resources.files("gateway.verify").joinpath("requests.lua").read_bytes()
    return Script("requests", source, sha1(source, usedforsecurity=False).hexdigest().encode())


REQUESTS = _load()


@dataclass(frozen=True, slots=True)
class _Odd:
    shard: str
    request_id: UUID
    tenant_id: UUID | None
    wrong: str


async def check_requests(
    redis: RedisClient, redis_url: str, engine: AsyncEngine, shards: Sequence[str], tenant_id: UUID | None
) -> tuple[int, list[Difference]]:
    """How many requests Redis remembers, and what is wrong with them. ``tenant_id``: only what is known to be this
    tenant's; a tombstone does not say whose it was, so then none is looked up in the ledger.

    Raises RedisUnavailable, redis.RedisError, DatabaseUnavailable.
    """
    seen, odd, unsure = 0, list[_Odd](), list[_Odd]()
    async for shard, ids in _remembered(redis, redis_url, shards):
        seen += len(ids)
        settled: list[_Odd] = []
        for each in await _look(redis, shard, ids):
            (odd if each.wrong else settled).append(each)
        if settled and tenant_id is None:
            there = await _rows(engine, [each.request_id for each in settled])
            unsure += [each for each in settled if each.request_id not in there]
    lost = await _lost(redis, engine, unsure) if unsure else []
    found = [
        Difference(kind, each.tenant_id, (("request", str(each.request_id)),), expected, count, meaning)
        for each in odd
        if tenant_id in (None, each.tenant_id)
        for kind, expected, count, meaning in [_MEANINGS[each.wrong]]
    ]
    found += [
        Difference("row", None, (("request", str(each.request_id)),), 1, 0, "a settled request has no row")
        for each in lost
    ]
    return seen, found


async def _remembered(
    redis: RedisClient, redis_url: str, shards: Sequence[str]
) -> AsyncIterator[tuple[str, list[str]]]:
    """Ids by shard, from reservations, tombstones and leases; some may come twice."""
    wanted = set(shards)
    for shard in shards:
        leases = await redis.command("ZRANGE", keys.leases(shard), 0, -1)
        for at in range(0, len(leases), _BATCH):
            yield shard, [member.decode() for member in leases[at : at + _BATCH]]
    pattern = f"{shards[0] if len(shards) == 1 else '{s??}'}:request:*"
    waiting: dict[str, list[str]] = {}
    async with asyncio_client(redis_url, timeout_s=_SCAN_TIMEOUT_S) as scanning:
        async for key in scanning.scan_iter(match=pattern, count=_PAGE):
            match = _REQUEST.fullmatch(key)
            if match is None or (shard := match[1].decode()) not in wanted:
                continue
            batch = waiting.setdefault(shard, [])
            batch.append(match[2].decode())
            if len(batch) >= _BATCH:
                yield shard, waiting.pop(shard)
    for shard, batch in waiting.items():
        yield shard, batch


async def _look(redis: RedisClient, shard: str, ids: Iterable[str]) -> list[_Odd]:
    arguments: tuple[int | str, ...] = (redis.time_offset_ms, keys.prefix(shard), OVERDUE_MS, *ids)
    reply = await redis.run(REQUESTS, (keys.leases(shard),), arguments)
    return [
        _Odd(shard, UUID(request_id.decode()), UUID(tenant.decode()) if tenant else None, wrong.decode())
        for request_id, tenant, wrong in reply
    ]


async def _rows(engine: AsyncEngine, request_ids: Sequence[UUID]) -> set[UUID]:
    """Those that have a row. Ids tell when they were made, and so in which partition their row is."""
    moments = [from_ms(request_id.int >> 80) for request_id in request_ids]
    values = {"ids": list(request_ids), "first": min(moments) - _AROUND, "last": max(moments) + _AROUND}
    query = text(
        "SELECT request_id FROM usage_events WHERE request_id = ANY (CAST(:ids AS uuid[])) "
        "AND admitted_at BETWEEN :first AND :last"
    )
    async with transaction(engine, timeout_s=_TIMEOUT_S) as connection:
        return set(await connection.scalars(query, values))


async def _lost(redis: RedisClient, engine: AsyncEngine, settled: Sequence[_Odd]) -> list[_Odd]:
    """Those whose event is nowhere: neither in a stream, nor a row, nor set aside; and that Redis still calls settled,
    since it may have been emptied just now."""
    for pause in (0.0, _PAUSE_S):
        await asyncio.sleep(pause)
        # The stream first: an event moves from there to the ledger, never back.
        there: set[UUID] = set()
        for shard in {each.shard for each in settled}:
            there |= await _on_the_way(redis, shard)
        settled = [each for each in settled if each.request_id not in there]
        for at in range(0, len(settled), _BATCH):
            batch = settled[at : at + _BATCH]
            there |= await _rows(engine, [each.request_id for each in batch])
        there |= await _set_aside(engine)
        settled = [each for each in settled if each.request_id not in there]
        remembered: set[UUID] = set()
        for each in settled:
            remembered |= {found.request_id for found in await _look(redis, each.shard, [str(each.request_id)])}
        settled = [each for each in settled if each.request_id in remembered]
        if not settled:
            break
    return list(settled)


async def _on_the_way(redis: RedisClient, shard: str) -> set[UUID]:
    found: set[UUID] = set()
    after = "-"
    while True:
        page = await redis.command("XRANGE", keys.usage(shard), after, "+", "COUNT", _PAGE)
        for entry_id, fields in page:
            after = "(" + entry_id.decode()
            found |= _ids(b" ".join(fields))
        if len(page) < _PAGE:
            return found


async def _set_aside(engine: AsyncEngine) -> set[UUID]:
    query = text(
        "SELECT raw FROM dead_usage_events UNION ALL SELECT convert_to(before->>'raw', 'UTF8') FROM audit_log "
        "WHERE kind = 'dead_event' AND action = 'discard'"
    )
    async with transaction(engine, timeout_s=_TIMEOUT_S) as connection:
        return {request_id for raw in await connection.scalars(query) for request_id in _ids(bytes(raw or b""))}


def _ids(raw: bytes) -> set[UUID]:
    try:
        return {UUID(match.decode()) for match in _ID.findall(raw)}
    except ValueError:
        return set()
