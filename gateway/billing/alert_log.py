"""Thresholds of budgets that were crossed, and what became of telling the tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import transaction
from gateway.db.tables import alerts
from gateway.tenants.changes import find_tenant
from gateway.tenants.records import Unknown


class UnknownAlert(Unknown):
    def __init__(self, alert_id: str) -> None:
        super().__init__(f"there is no alert {alert_id[:100]!r}")


@dataclass(frozen=True, slots=True)
class AlertRecord:
    id: UUID
    tenant_id: UUID
    limit_id: UUID
    period_start: datetime
    threshold: int
    """Percent of the amount."""
    spent_nano_usd: int
    amount_nano_usd: int
    subject: str
    target: str
    window: str
    crossed_at: datetime
    attempts: int
    next_attempt_at: datetime | None
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_error: str | None


_COLUMNS = tuple(alerts.c[name] for name in AlertRecord.__slots__)


async def list_alerts(
    engine: AsyncEngine, *, tenant: str | None = None, after: UUID | None = None, limit: int
) -> list[AlertRecord]:
    """The newest first; ``after``: those older than that one. Raises UnknownTenant, DatabaseUnavailable."""
    query = select(*_COLUMNS).order_by(alerts.c.crossed_at.desc(), alerts.c.id.desc()).limit(limit)
    if after is not None:
        begin = alerts.alias()
        last = select(begin.c.crossed_at, begin.c.id).where(begin.c.id == after)
        query = query.where(tuple_(alerts.c.crossed_at, alerts.c.id) < last.scalar_subquery())
    async with transaction(engine) as connection:
        if tenant is not None:
            query = query.where(alerts.c.tenant_id == (await find_tenant(connection, tenant)).id)
        return [AlertRecord(**row._mapping) for row in await connection.execute(query)]


async def find_alert(engine: AsyncEngine, alert_id: UUID) -> AlertRecord:
    """Raises UnknownAlert, DatabaseUnavailable."""
    async with transaction(engine) as connection:
        row = (await connection.execute(select(*_COLUMNS).where(alerts.c.id == alert_id))).one_or_none()
    if row is None:
        raise UnknownAlert(str(alert_id))
    return AlertRecord(**row._mapping)
