"""Usage reports: what was asked, used and charged, summed by whatever the reader wants to see apart.

Whole quarter hours come from the rollups, ragged ends of a range from the rows, in one statement and so one snapshot:
the parts of a range always add up to the whole, and to the rows.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec
from sqlalchemy import ARRAY, Date, Select, any_, cast, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.ledger import QUARTER_S, quarter_of
from gateway.billing.usage import Status, usd_text
from gateway.db.engine import transaction
from gateway.db.tables import dead_usage_events, tenants, usage_events, usage_rollup

Dimension = Literal["tenant", "key", "route", "status", "day"]
DIMENSIONS: tuple[Dimension, ...] = ("tenant", "key", "route", "status", "day")
STATUSES: tuple[Status, ...] = ("ok", "aborted", "failed", "abandoned", "cache_hit", "replayed")
REPORT_TIMEOUT_S = 30.0
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(2200, 1, 1, tzinfo=UTC)
_MEASURES = ("prompt_tokens", "completion_tokens", "cached_tokens", "charged_nano_usd", "cost_nano_usd")


class InvalidRange(ValueError):
    """A report that cannot be made as asked; the message says what to change."""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a report. Dimensions that were not asked for are None; amounts are given exactly."""

    tenant: str | None = None
    """Name of the tenant; its id, should it be gone."""
    key_id: str | None = None
    route: str | None = None
    status: Status | None = None
    day: date | None = None
    requests: int
    requests_by_status: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    charged_nano_usd: int
    charged_usd: str
    """The same amount in USD, all nine decimal places."""
    cost_nano_usd: int
    cost_usd: str


async def usage_report(
    engine: AsyncEngine,
    *,
    tenant: UUID | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    group_by: Collection[Dimension] = (),
    timezone: str = "UTC",
) -> list[UsageRow]:
    """Requests admitted at or after ``start`` and before ``end``, sorted by what they are grouped by.

    tenant: one tenant; all, if None. start, end: timezone-aware; None means without end on that side. ``day``
    groups by the days of ``timezone`` (IANA name). Without ``group_by``: one row, or none if nothing was used.
    Raises InvalidRange, DatabaseUnavailable.
    """
    begin, finish = _range(start, end)
    wanted = [dimension for dimension in DIMENSIONS if dimension in group_by]
    if len(wanted) != len(set(group_by)):
        raise InvalidRange(f"group_by takes {', '.join(DIMENSIONS)}")
    _check_zone(timezone)
    source = _source(tenant, begin, finish).subquery()
    labels = {
        "tenant": func.coalesce(tenants.c.name, func.cast(source.c.tenant_id, tenants.c.name.type)),
        "key": source.c.key_id,
        "route": source.c.route,
        "status": source.c.status,
        "day": cast(func.timezone(timezone, source.c.moment), Date),
    }
    groups = [labels[dimension].label(dimension) for dimension in wanted]
    query = (
        select(
            *groups,
            func.sum(source.c.requests).label("requests"),
            *(func.sum(source.c[name]).label(name) for name in _MEASURES),
            *(
                func.coalesce(func.sum(source.c.requests).filter(source.c.status == status), 0).label(f"of_{status}")
                for status in STATUSES
            ),
        )
        .select_from(source.outerjoin(tenants, tenants.c.id == source.c.tenant_id))
        .group_by(*groups)
        .having(func.sum(source.c.requests) > 0)
        .order_by(*groups)
    )
    async with transaction(engine, timeout_s=REPORT_TIMEOUT_S) as connection:
        return [_row(row, wanted) for row in await connection.execute(query)]


async def charged_between(
    engine: AsyncEngine, tenant_id: UUID, start: datetime, end: datetime, *, excluding: Collection[UUID] = ()
) -> int:
    """Nano-USD charged to a tenant for requests admitted from ``start`` to before ``end``, as far as the ledger has
    them. ``excluding``: requests to leave out. Raises InvalidRange, DatabaseUnavailable."""
    begin, finish = _range(start, end)
    source = _source(tenant_id, begin, finish).subquery()
    amount = select(func.coalesce(func.sum(source.c.charged_nano_usd), 0)).scalar_subquery()
    request_id = usage_events.c.request_id
    # One parameter, however many they are: Postgres takes 65,535 at most.
    excluded = request_id == any_(literal(list(excluding), ARRAY(request_id.type)))
    rows = _events(tenant_id, [(begin, finish)]).where(excluded).subquery()
    left_out = select(func.coalesce(func.sum(rows.c.charged_nano_usd), 0)).scalar_subquery()
    async with transaction(engine, timeout_s=REPORT_TIMEOUT_S) as connection:
        return int(await connection.scalar(select(amount - left_out if excluding else amount)) or 0)


async def dead_event_count(engine: AsyncEngine) -> int:
    """How many usage events could not become rows and wait in ``dead_usage_events``. Raises DatabaseUnavailable."""
    async with transaction(engine, timeout_s=REPORT_TIMEOUT_S) as connection:
        return int(await connection.scalar(select(func.count()).select_from(dead_usage_events)) or 0)


def _range(start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    for name, moment in (("start", start), ("end", end)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidRange(f"{name} needs a time zone: write 2027-01-01T00:00:00Z")
    # No row lies outside of these, and arithmetic near the calendar's own ends would overflow.
    begin = min(max(start or _EARLIEST, _EARLIEST), _LATEST).astimezone(UTC)
    finish = max(min(end or _LATEST, _LATEST), _EARLIEST).astimezone(UTC)
    if start is not None and end is not None and start >= end:
        raise InvalidRange("start must be before end")
    return begin, finish


def _check_zone(timezone: str) -> None:
    try:
        zoneinfo.ZoneInfo(timezone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidRange(f"{timezone[:100]!r} is not a time zone; use an IANA name such as Europe/Berlin") from None


def _source(tenant: UUID | None, begin: datetime, finish: datetime) -> Any:
    """Rollups of the whole quarter hours in the range, and rows of its ragged ends."""
    first = quarter_of(begin)
    if first != begin:
        first += timedelta(seconds=QUARTER_S)
    last = quarter_of(finish)
    if first >= last:
        return _events(tenant, [(begin, finish)])
    whole = select(
        usage_rollup.c.bucket.label("moment"),
        usage_rollup.c.tenant_id,
        usage_rollup.c.key_id,
        usage_rollup.c.route,
        usage_rollup.c.status,
        usage_rollup.c.requests,
        *(usage_rollup.c[name] for name in _MEASURES),
    ).where(usage_rollup.c.bucket >= first, usage_rollup.c.bucket < last)
    if tenant is not None:
        whole = whole.where(usage_rollup.c.tenant_id == tenant)
    ragged = [(a, b) for a, b in ((begin, first), (last, finish)) if a < b]
    return union_all(whole, _events(tenant, ragged)) if ragged else whole


def _events(tenant: UUID | None, ranges: list[tuple[datetime, datetime]]) -> Select[Any]:
    admitted_at = usage_events.c.admitted_at
    query = select(
        admitted_at.label("moment"),
        usage_events.c.tenant_id,
        usage_events.c.key_id,
        usage_events.c.route,
        usage_events.c.status,
        literal(1).label("requests"),
        *(usage_events.c[name] for name in _MEASURES),
    ).where(or_(*((admitted_at >= begin) & (admitted_at < finish) for begin, finish in ranges)))
    return query if tenant is None else query.where(usage_events.c.tenant_id == tenant)


def _row(row: Any, wanted: list[Dimension]) -> UsageRow:
    named = {"key_id" if dimension == "key" else dimension: getattr(row, dimension) for dimension in wanted}
    return UsageRow(
        **named,
        requests=int(row.requests),
        requests_by_status={status: int(getattr(row, f"of_{status}")) for status in STATUSES},
        prompt_tokens=int(row.prompt_tokens),
        completion_tokens=int(row.completion_tokens),
        cached_tokens=int(row.cached_tokens),
        charged_nano_usd=int(row.charged_nano_usd),
        charged_usd=usd_text(int(row.charged_nano_usd)),
        cost_nano_usd=int(row.cost_nano_usd),
        cost_usd=usd_text(int(row.cost_nano_usd)),
    )
