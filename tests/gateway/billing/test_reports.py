from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.entries import Entry
from gateway.billing.ledger import ensure_partition, record
from gateway.billing.reports import (
    DIMENSIONS,
    STATUSES,
    InvalidRange,
    UsageRow,
    charged_between,
    dead_event_count,
    usage_report,
)
from gateway.billing.usage import UsageEvent, usd_text
from gateway.clock import SystemClock
from gateway.db.engine import transaction
from gateway.db.partitions import months_ahead
from gateway.tenants.directory import Directory
from tests.gateway.billing.support import NOON, TENANT, usage_event
from tests.gateway.tenants.support import ACTOR

BEGIN = datetime(2026, 10, 24, tzinfo=UTC)
DAYS = 3
"""They hold the end of summer time in Europe: a day of 25 hours."""


async def write(engine: AsyncEngine, events: Iterable[UsageEvent]) -> None:
    entries = [Entry("1-0", b"", event, 1) for event in events]
    async with transaction(engine, timeout_s=20) as connection:
        for month in months_ahead(min(entry.event.admitted_at for entry in entries), 1):
            await ensure_partition(connection, month)
        await record(connection, entries)


def many_events(count: int = 400) -> list[UsageEvent]:
    """At every odd moment, on the edges of quarter hours and just beside them too."""
    chance = random.Random(11)
    events = []
    for _ in range(count):
        moment = BEGIN + timedelta(microseconds=chance.randrange(DAYS * 24 * 3600 * 10**6))
        if chance.random() < 0.5:
            quarter = moment.replace(minute=moment.minute // 15 * 15, second=0, microsecond=0)
            moment = quarter + timedelta(microseconds=chance.choice([-1, 0, 1]))
        events.append(
            usage_event(
                admitted_at=max(moment, BEGIN),
                tenant_id=UUID(int=chance.randint(1, 3)),
                key_id=chance.choice(["k1", "k2"]),
                route=chance.choice(["m", "n"]),
                status=chance.choice(STATUSES),
                prompt_tokens=chance.randrange(1000),
                completion_tokens=chance.randrange(1000),
                cached_tokens=chance.randrange(10),
                charged_nano_usd=chance.randrange(2**40),
                cost_nano_usd=chance.randrange(2**40),
            )
        )
    return events


def sums(events: Iterable[UsageEvent]) -> dict[str, Any]:
    events = list(events)
    return {
        "requests": len(events),
        "requests_by_status": {status: sum(event.status == status for event in events) for status in STATUSES},
        "prompt_tokens": sum(event.prompt_tokens for event in events),
        "completion_tokens": sum(event.completion_tokens for event in events),
        "cached_tokens": sum(event.cached_tokens for event in events),
        "charged_nano_usd": sum(event.charged_nano_usd for event in events),
        "charged_usd": usd_text(sum(event.charged_nano_usd for event in events)),
        "cost_nano_usd": sum(event.cost_nano_usd for event in events),
        "cost_usd": usd_text(sum(event.cost_nano_usd for event in events)),
    }


def measures(row: UsageRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in sums([])}


@pytest.fixture
async def filled(engine: AsyncEngine) -> tuple[AsyncEngine, list[UsageEvent]]:
    events = many_events()
    await write(engine, events)
    return engine, events


Filled = tuple[AsyncEngine, list[UsageEvent]]


async def test_without_bounds_all_rows_are_summed(filled: Filled) -> None:
    engine, events = filled
    (row,) = await usage_report(engine)
    assert measures(row) == sums(events)
    assert (row.tenant, row.key_id, row.route, row.status, row.day) == (None,) * 5


async def test_any_half_open_range_holds_exactly_its_rows(filled: Filled) -> None:
    engine, events = filled
    chance = random.Random(5)
    edges = [event.admitted_at for event in events]
    for _ in range(60):
        start, end = sorted(
            chance.choice(edges) + timedelta(microseconds=chance.choice([-1, 0, 0, 1])) for _ in range(2)
        )
        if chance.random() < 0.2:
            end = start + timedelta(minutes=chance.randint(1, 14))
        if start == end:
            continue
        tenant = chance.choice([None, UUID(int=1), UUID(int=9)])
        inside = [
            event
            for event in events
            if start <= event.admitted_at < end and (tenant is None or event.tenant_id == tenant)
        ]
        rows = await usage_report(engine, tenant=tenant, start=start, end=end)
        assert [measures(row) for row in rows] == ([sums(inside)] if inside else [])
        if tenant is not None:
            charged = sum(event.charged_nano_usd for event in inside)
            assert await charged_between(engine, tenant, start, end) == charged
            left_out = inside[::3] + events[:3]
            assert await charged_between(
                engine, tenant, start, end, excluding=[event.request_id for event in left_out]
            ) == sum(event.charged_nano_usd for event in inside if event not in left_out)


async def test_more_requests_can_be_left_out_than_a_statement_has_parameters(filled: Filled) -> None:
    engine, events = filled
    tenant = events[0].tenant_id
    own = [event for event in events if event.tenant_id == tenant]
    left_out = [own[0].request_id, *(UUID(int=number) for number in range(70_000))]
    charged = await charged_between(
        engine, tenant, BEGIN - timedelta(days=10), BEGIN + timedelta(days=30), excluding=left_out
    )
    assert charged == sum(event.charged_nano_usd for event in own[1:])


async def test_ranges_that_touch_add_up(filled: Filled) -> None:
    engine, events = filled
    chance = random.Random(6)
    cuts = sorted(chance.choice(events).admitted_at for _ in range(10))
    bounds = [None, *dict.fromkeys(cuts), None]
    total: Counter[str] = Counter()
    for start, end in pairwise(bounds):
        for row in await usage_report(engine, start=start, end=end):
            total["requests"] += row.requests
            total["charged"] += row.charged_nano_usd
    assert total["requests"] == len(events)
    assert total["charged"] == sum(event.charged_nano_usd for event in events)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/St_Johns", "Pacific/Apia"])
async def test_days_of_any_zone_add_up_to_the_rows(zone: str, filled: Filled) -> None:
    engine, events = filled
    local: dict[date, list[UsageEvent]] = {}
    for event in events:
        local.setdefault(event.admitted_at.astimezone(ZoneInfo(zone)).date(), []).append(event)
    rows = await usage_report(engine, group_by=["day"], timezone=zone)
    assert [(row.day, measures(row)) for row in rows] == [(day, sums(local[day])) for day in sorted(local)]
    for day, inside in local.items():
        start, end = (datetime(d.year, d.month, d.day, tzinfo=ZoneInfo(zone)) for d in (day, day + timedelta(days=1)))
        (row,) = await usage_report(engine, start=start, end=end)
        assert measures(row) == sums(inside)


async def test_groups_are_apart_and_in_order(filled: Filled) -> None:
    engine, events = filled
    rows = await usage_report(engine, group_by=DIMENSIONS)
    found = [(row.tenant, row.key_id, row.route, row.status, row.day) for row in rows]
    assert len(set(found)) == len(found)
    apart = Counter(
        (str(event.tenant_id), event.key_id, event.route, event.status, event.admitted_at.date()) for event in events
    )
    assert {key: row.requests for key, row in zip(found, rows, strict=True)} == apart
    by_route = await usage_report(engine, group_by=["route"])
    assert [row.route for row in by_route] == ["m", "n"]


async def test_tenants_go_by_name(engine: AsyncEngine) -> None:
    tenant = await Directory(engine, SystemClock()).create_tenant(ACTOR, "acme")
    await write(engine, [usage_event(tenant_id=tenant.id), usage_event(tenant_id=TENANT)])
    rows = await usage_report(engine, group_by=["tenant"])
    assert sorted(str(row.tenant) for row in rows) == sorted(["acme", str(TENANT)])
    assert [row.tenant for row in await usage_report(engine, tenant=tenant.id, group_by=["tenant"])] == ["acme"]


async def test_nothing_used_is_no_row(engine: AsyncEngine) -> None:
    assert await usage_report(engine) == []
    assert await charged_between(engine, TENANT, NOON, NOON + timedelta(days=1)) == 0
    assert await dead_event_count(engine) == 0


async def test_a_status_that_was_revised_away_is_gone(engine: AsyncEngine) -> None:
    event = usage_event(status="abandoned", charged_nano_usd=5)
    final = usage_event(request_id=event.request_id, status="ok", charged_nano_usd=8)
    await write(engine, [event])
    async with transaction(engine) as connection:
        await record(connection, [Entry("1-1", b"", final, 2)])
    rows = await usage_report(engine, group_by=["status"])
    assert [(row.status, row.requests, row.charged_nano_usd) for row in rows] == [("ok", 1, 8)]


async def test_ranges_that_cannot_be_meant_are_refused(engine: AsyncEngine) -> None:
    naive = NOON.replace(tzinfo=None)
    for start, end in ((NOON, NOON), (NOON, NOON - timedelta(days=1)), (naive, None), (None, naive)):
        with pytest.raises(InvalidRange):
            await usage_report(engine, start=start, end=end)
    for zone in ("", "Mars/Olympus", "../etc/passwd", "\x00"):
        with pytest.raises(InvalidRange):
            await usage_report(engine, timezone=zone)
    with pytest.raises(InvalidRange):
        await usage_report(engine, group_by=["shoe size"])  # type: ignore[list-item]


async def test_the_ends_of_the_calendar_are_no_trouble(engine: AsyncEngine) -> None:
    await write(engine, [usage_event()])
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    far_east, far_west = ZoneInfo("Pacific/Kiritimati"), ZoneInfo("Pacific/Pago_Pago")
    for start, end in (
        (first, last),
        (datetime.min.replace(tzinfo=far_east), datetime.max.replace(tzinfo=far_west)),
        (None, last),
        (first, None),
    ):
        assert [row.requests for row in await usage_report(engine, start=start, end=end)] == [1]
    assert await usage_report(engine, start=first, end=first + timedelta(days=1)) == []
    assert await usage_report(engine, start=last - timedelta(days=1), end=last) == []
