"""How many requests were refused, whose and why: counted by 15 minutes, for a request that was refused has no row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.report_query import InvalidReport
from gateway.db.engine import transaction
from gateway.db.tables import refusals, tenants
from gateway.tenants.changes import find_tenant

RefusalKey = tuple[UUID, str, str]
"""Tenant, key and reason of one count."""
_KEY = (refusals.c.tenant_id, refusals.c.key_id, refusals.c.reason)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    tenant_id: UUID
    tenant: str | None
    key_id: str
    reason: str
    """``requests``, ``tokens``, ``concurrent`` or ``budget``: what was limited."""
    count: int


async def refusal_counts(
    engine: AsyncEngine,
    *,
    tenant: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    after: RefusalKey | None = None,
    limit: int,
) -> list[RefusalCount]:
    """Sums over the quarters of an hour that begin in ``start`` to ``end`` (excluded), by tenant, key and reason; those
    behind ``after``.

    tenant: name or id. Raises UnknownTenant, InvalidReport, DatabaseUnavailable.
    """
    for name, moment in (("start", start), ("end", end)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidReport(name, f"{name} needs a time zone: write 2027-01-01T00:00:00Z")
    query = (
        select(*_KEY, tenants.c.name.label("tenant"), func.sum(refusals.c.count).label("count"))
        .select_from(refusals.outerjoin(tenants, tenants.c.id == refusals.c.tenant_id))
        .group_by(*_KEY, tenants.c.name)
        .order_by(*_KEY)
        .limit(limit)
    )
    if start is not None:
        query = query.where(refusals.c.bucket >= start)
    if end is not None:
        query = query.where(refusals.c.bucket < end)
    if after is not None:
        query = query.where(tuple_(*_KEY) > after)
    async with transaction(engine) as connection:
        if tenant is not None:
            query = query.where(refusals.c.tenant_id == (await find_tenant(connection, tenant)).id)
        return [_count(row) for row in await connection.execute(query)]


def _count(row: Any) -> RefusalCount:
    return RefusalCount(**(dict(row._mapping) | {"count": int(row._mapping["count"])}))
