"""A tenant's invoice for one month: its ledger, summed by project and model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.billing.local_time import midnight, month_after
from gateway.billing.report_query import UsageQuery, parse_month
from gateway.billing.report_rows import UsageRow, for_tenant
from gateway.billing.reports import reading, usage_report
from gateway.billing.usage import NANO_PER_USD, usd_text
from gateway.db.tables import audit_log
from gateway.tenants.changes import find_tenant
from gateway.tenants.principal import LONGEST_REQUEST_S
from gateway.tenants.records import TenantRecord

SETTLED_AFTER = timedelta(seconds=2 * LONGEST_REQUEST_S)
"""By then the last request of a month has ended and its row is written, unless something was down meanwhile."""
_CENT = Decimal("0.01")


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    number: str
    """The same whenever it is made, and no other invoice's: it goes by the tenant's id, for names change."""
    tenant: str
    tenant_id: str
    month: str
    timezone: str
    """The tenant's in this month. Another one begins with the next: so no request is in two months' invoices, or none,
    and an invoice stays as it is."""
    start: datetime
    """Midnight in the zone of the month before, which is nearly always the same."""
    end: datetime
    """Not part of it any more."""
    issued_at: datetime
    final: bool
    """False: the month, or a request of it, may still be running, and the sums may grow."""
    lines: list[UsageRow]
    """By project and model."""
    requests: int
    charged_nano_usd: int
    charged_usd: str
    """The exact sum of the ledger, all nine decimal places."""
    total_usd: str
    """The same, rounded half to even to cents."""


async def invoice(engine: AsyncEngine, tenant: str, month: str, now: datetime) -> Invoice:
    """``tenant``: name or id; ``month``: ``2026-11``. Raises UnknownTenant, InvalidReport, DatabaseUnavailable."""
    first = parse_month(month)
    async with reading(engine, None) as connection:
        record = await find_tenant(connection, tenant)
        changes = await _zone_changes(connection, record)
    before, zone = (_zone_at(moment, changes, record) for moment in (_month_before(first), first))
    start, end = midnight(first, before), midnight(month_after(first), zone)
    query = UsageQuery(tenant=[str(record.id)], start=start, end=end, group_by=["project", "model"])
    lines = [for_tenant(row) for row in (await usage_report(engine, query)).rows]
    charged = sum(line.charged_nano_usd for line in lines)
    return Invoice(
        number=f"{month}-{record.id.hex[-12:]}",
        tenant=record.name,
        tenant_id=str(record.id),
        month=month,
        timezone=zone.key,
        start=start.astimezone(before),
        end=end.astimezone(zone),
        issued_at=now.astimezone(UTC),
        final=now >= end + SETTLED_AFTER,
        lines=lines,
        requests=sum(line.requests for line in lines),
        charged_nano_usd=charged,
        charged_usd=usd_text(charged),
        total_usd=cents(charged),
    )


async def _zone_changes(connection: AsyncConnection, tenant: TenantRecord) -> list[tuple[datetime, str]]:
    """When the tenant's zone was changed, and what it was before; the oldest change first."""
    before, after = (column["timezone"].astext for column in (audit_log.c.before, audit_log.c.after))
    query = select(audit_log.c.at, before).where(
        audit_log.c.tenant_id == tenant.id,
        audit_log.c.kind == "tenant",
        audit_log.c.action == "update",
        before != after,
    )
    return [(row[0], row[1]) for row in await connection.execute(query.order_by(audit_log.c.at))]


def _zone_at(day: date, changes: Sequence[tuple[datetime, str]], tenant: TenantRecord) -> ZoneInfo:
    """In force as the day began in UTC."""
    moment = midnight(day, ZoneInfo("UTC"))
    return ZoneInfo(next((zone for at, zone in changes if at > moment), tenant.timezone))


def _month_before(first: date) -> date:
    return (first - timedelta(days=1)).replace(day=1)


def cents(nano_usd: int) -> str:
    """USD with two decimal places, rounded half to even: ``12.35``."""
    return str((Decimal(nano_usd) / NANO_PER_USD).quantize(_CENT, ROUND_HALF_EVEN))
