"""A tenant's invoice for one month: its ledger, summed by project and model."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.local_time import month_range
from gateway.billing.report_query import UsageQuery, parse_month
from gateway.billing.report_rows import UsageRow, for_tenant
from gateway.billing.reports import reading, usage_report
from gateway.billing.usage import NANO_PER_USD, usd_text
from gateway.tenants.changes import find_tenant
from gateway.tenants.principal import LONGEST_REQUEST_S

SETTLED_AFTER = timedelta(seconds=2 * LONGEST_REQUEST_S)
"""By then the last request of a month has ended and its row is written, unless something was down meanwhile."""
_CENT = Decimal("0.01")


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    number: str
    """The same whenever it is made."""
    tenant: str
    tenant_id: str
    month: str
    timezone: str
    """The tenant's, whose midnights bound the month."""
    start: datetime
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
    zone = ZoneInfo(record.timezone)
    start, end = month_range(first, zone)
    query = UsageQuery(
        tenant=[str(record.id)], start=start, end=end, timezone=record.timezone, group_by=["project", "model"]
    )
    lines = [for_tenant(row) for row in (await usage_report(engine, query)).rows]
    charged = sum(line.charged_nano_usd for line in lines)
    return Invoice(
        number=f"{record.name}-{month}",
        tenant=record.name,
        tenant_id=str(record.id),
        month=month,
        timezone=record.timezone,
        start=start.astimezone(zone),
        end=end.astimezone(zone),
        issued_at=now.astimezone(UTC),
        final=now >= end + SETTLED_AFTER,
        lines=lines,
        requests=sum(line.requests for line in lines),
        charged_nano_usd=charged,
        charged_usd=usd_text(charged),
        total_usd=cents(charged),
    )


def cents(nano_usd: int) -> str:
    """USD with two decimal places, rounded half to even: ``12.35``."""
    return str((Decimal(nano_usd) / NANO_PER_USD).quantize(_CENT, ROUND_HALF_EVEN))
