"""``verify``: looks at everything, and again at what did not agree, since the system runs on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.redis import RedisClient
from gateway.db.engine import transaction
from gateway.db.tables import dead_usage_events, tenants
from gateway.tenants.principal import shard_of
from gateway.verify.counters import REPEATABLE_READ, check_counters
from gateway.verify.difference import Difference
from gateway.verify.refusals import check_refusals
from gateway.verify.requests import check_requests
from gateway.verify.rollups import check_doubled, check_rollups
from gateway.verify.rows import dropped_months

PAUSES_S = (0.3, 0.7, 1.5, 3.0)
"""Between looks at a tenant that did not agree: longer, together, than gateways take to bring back what Redis lost."""
ROWS_TIMEOUT_S = 3600.0
_AT_ONCE = 8


@dataclass
class Verification:
    """What was looked at and what did not agree."""

    tenants: int = 0
    counters: int = 0
    unchecked: int = 0
    """Counters of which nothing can be said: windows younger than their length; end users whose rows were dropped."""
    running: int = 0
    remembered: int = 0
    """Requests, running or ended, that Redis knows of."""
    refusals_waiting: int = 0
    dead: int = 0
    """Usage events that are set aside."""
    differences: list[Difference] = field(default_factory=list)
    busy: list[UUID] = field(default_factory=list)
    """Tenants that never agreed, but each time in another way: they moved too fast to be told of."""


async def verify(
    redis: RedisClient,
    redis_url: str,
    engine: AsyncEngine,
    *,
    tenant_id: UUID | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
) -> Verification:
    """``tenant_id``: only what is this tenant's. ``redis_url``: for a client of its own that goes through all keys.

    Raises RedisUnavailable, redis.RedisError, DatabaseUnavailable.
    """
    result = Verification()
    async with transaction(engine, timeout_s=ROWS_TIMEOUT_S) as connection:
        await connection.execute(REPEATABLE_READ)
        query = select(tenants.c.id).order_by(tenants.c.name)
        ids = list(await connection.scalars(query if tenant_id is None else query.where(tenants.c.id == tenant_id)))
        dropped = await dropped_months(connection)
        result.dead = int(await connection.scalar(select(func.count()).select_from(dead_usage_events)) or 0)
        result.differences += await check_rollups(connection, tenant_id=tenant_id, dropped=dropped)
        result.differences += await check_doubled(connection, tenant_id=tenant_id)
    result.tenants = len(ids)
    lanes = asyncio.Semaphore(_AT_ONCE)

    async def look(each: UUID) -> None:
        async with lanes:
            await _look(result, redis, engine, each, dropped, pauses_s)

    try:
        async with asyncio.TaskGroup() as tasks:
            for each in ids:
                tasks.create_task(look(each))
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from faults
    shards = keys.ALL_SHARDS if tenant_id is None else (shard_of(tenant_id),)
    result.remembered, odd = await check_requests(redis, redis_url, engine, shards, tenant_id)
    result.refusals_waiting, unreadable = await check_refusals(redis, shards, tenant_id)
    result.differences += odd + unreadable
    result.differences = sorted(set(result.differences), key=lambda each: (each.kind, str(each.tenant_id), each.where))
    return result


async def _look(
    result: Verification,
    redis: RedisClient,
    engine: AsyncEngine,
    tenant_id: UUID,
    dropped: Sequence[str],
    pauses_s: Sequence[float],
) -> None:
    """What differs in the same way at each look is wrong; what comes and goes is a system at work."""
    checked = await check_counters(redis, engine, tenant_id, dropped=dropped)
    lasting = {each.identity: each for each in checked.differences}
    for pause in pauses_s:
        if not checked.differences:
            break
        await asyncio.sleep(pause)
        checked = await check_counters(redis, engine, tenant_id, dropped=dropped)
        lasting = {each.identity: each for each in checked.differences if each.identity in lasting}
    result.counters += checked.counters
    result.running += checked.running
    result.unchecked += checked.unchecked
    if not checked.differences:
        return
    result.differences += lasting.values()
    if not lasting:
        result.busy.append(tenant_id)
