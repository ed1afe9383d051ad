from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.entries import Entry
from gateway.billing.ledger import record
from gateway.billing.ledger_sums import PostgresSums
from gateway.billing.report_query import DIMENSIONS, InvalidReport, NotFound, UsageQuery
from gateway.billing.report_rows import fields_of
from gateway.billing.reports import dead_event_count, reading, usage_report
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from tests.gateway.billing.report_support import (
    BEGIN,
    HOURS,
    TENANTS,
    grouped,
    many_events,
    measures,
    name_tenants,
    project_of,
    report,
    sums,
    write,
)
from tests.gateway.billing.support import NOON, TENANT, usage_event
from tests.gateway.db.support import opened

ZONES = ["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/St_Johns", "Pacific/Apia", "Australia/Lord_Howe"]
ZONES += ["Asia/Kolkata", "Pacific/Chatham", "America/Havana", "Africa/Cairo", "Pacific/Kiritimati"]


@pytest.fixture
async def filled(engine: AsyncEngine) -> tuple[AsyncEngine, list[UsageEvent]]:
    events = many_events()
    await write(engine, events)
    return engine, events


Filled = tuple[AsyncEngine, list[UsageEvent]]


async def test_without_bounds_all_rows_are_summed(filled: Filled) -> None:
    engine, events = filled
    (row,) = await report(engine)
    assert measures(row) == sums(events)
    assert {getattr(row, field) for dimension in DIMENSIONS for field in fields_of(dimension)} == {UNSET}


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
        rows = (await usage_report(engine, UsageQuery(start=start, end=end), own=tenant)).rows
        assert [measures(row) for row in rows] == ([sums(inside)] if inside else [])
        if tenant is not None:
            charged = sum(event.charged_nano_usd for event in inside)
            assert await PostgresSums(engine).charged(tenant, start, end) == charged
            left_out = inside[::3] + events[:3]
            assert await PostgresSums(engine).charged(
                tenant, start, end, excluding=[event.request_id for event in left_out]
            ) == sum(event.charged_nano_usd for event in inside if event not in left_out)


async def test_more_requests_can_be_left_out_than_a_statement_has_parameters(filled: Filled) -> None:
    engine, events = filled
    tenant = events[0].tenant_id
    own = [event for event in events if event.tenant_id == tenant]
    left_out = [own[0].request_id, *(UUID(int=number) for number in range(70_000))]
    charged = await PostgresSums(engine).charged(
        tenant, BEGIN - timedelta(days=10), BEGIN + timedelta(days=30), excluding=left_out
    )
    assert charged == sum(event.charged_nano_usd for event in own[1:])


async def test_ranges_that_touch_add_up(filled: Filled) -> None:
    engine, events = filled
    chance = random.Random(6)
    cuts = sorted(chance.choice(events).admitted_at for _ in range(10))
    bounds = [None, *dict.fromkeys(cuts), None]
    total: Counter[str] = Counter()
    for start, end in pairwise(bounds):
        for row in await report(engine, start=start, end=end):
            total["requests"] += row.requests
            total["charged"] += row.charged_nano_usd
    assert total["requests"] == len(events)
    assert total["charged"] == sum(event.charged_nano_usd for event in events)


def test_slots_of_any_zone_and_range_add_up_to_the_rows(database_url: str) -> None:
    """What the rows say by Python's own reckoning of local time, the report says to the last digit."""
    events = many_events()
    edges = [event.admitted_at for event in events] + [BEGIN, BEGIN + timedelta(hours=HOURS)]
    moments = st.sampled_from(edges) | st.integers(0, HOURS * 3600 * 10**6).map(
        lambda us: BEGIN + timedelta(microseconds=us)
    )
    names = {
        # Of an hour that comes twice the first has the larger offset.
        "hour": lambda local: (local.replace(minute=0, second=0, microsecond=0, tzinfo=None), -local.utcoffset()),
        "day": lambda local: local.date(),
        "month": lambda local: f"{local:%Y-%m}",
    }

    with asyncio.Runner() as runner:

        async def check(zone: str, units: list[str], start: datetime | None, end: datetime | None, model: bool) -> None:
            async with opened(database_url, pool_size=1) as engine:
                rows = await report(engine, start=start, end=end, timezone=zone, group_by=[*units, *["model"][:model]])
            inside = [e for e in events if (not start or start <= e.admitted_at) and (not end or e.admitted_at < end)]
            local = ZoneInfo(zone)
            expected = grouped(
                inside,
                lambda event: (
                    *(names[unit](event.admitted_at.astimezone(local)) for unit in units),
                    *[event.route][:model],
                ),
            )
            found = {}
            for row in rows:
                key: list[object] = []
                for unit in units:
                    value = getattr(row, unit)
                    key.append((value.replace(tzinfo=None), -value.utcoffset()) if unit == "hour" else value)
                found[(*key, *[row.model][:model])] = measures(row)
            assert found == expected
            if units != ["hour"]:
                assert list(found) == list(expected)

        @settings(max_examples=50)
        @given(
            st.sampled_from(ZONES),
            st.sampled_from([["hour"], ["day"], ["month"], ["day", "hour"], ["month", "day"]]),
            st.none() | moments,
            st.none() | moments,
            st.booleans(),
        )
        def holds(zone: str, units: list[str], start: datetime | None, end: datetime | None, model: bool) -> None:
            if start is not None and end is not None and start >= end:
                start, end = end, start + timedelta(microseconds=1)
            runner.run(check(zone, units, start, end, model))

        async def fill() -> None:
            async with opened(database_url) as engine:
                await write(engine, events)

        runner.run(fill())
        holds()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kathmandu"])
async def test_a_days_own_range_is_its_line(zone: str, filled: Filled) -> None:
    engine, events = filled
    for row in await report(engine, group_by=["day"], timezone=zone):
        assert not isinstance(row.day, type(UNSET))
        start, end = (
            datetime(d.year, d.month, d.day, tzinfo=ZoneInfo(zone)) for d in (row.day, row.day + timedelta(days=1))
        )
        for alone in (
            await report(engine, start=start, end=end),
            await report(engine, day=[row.day], timezone=zone),
        ):
            assert [measures(each) for each in alone] == [measures(row)]
    (whole,) = await report(engine, month=["2026-10"], timezone=zone)
    assert measures(whole) == sums(events)


async def test_the_hour_that_comes_twice_is_two_hours(engine: AsyncEngine) -> None:
    first = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    await write(engine, [usage_event(admitted_at=first + timedelta(hours=step)) for step in (0, 1, 1)])
    rows = await report(engine, group_by=["hour"], timezone="Europe/Berlin")
    told = [(str(row.hour), row.requests) for row in rows]
    assert told == [("2026-10-25 02:00:00+02:00", 1), ("2026-10-25 02:00:00+01:00", 2)]
    for row in rows:
        assert [each.requests for each in await report(engine, hour=[row.hour], timezone="Europe/Berlin")] == [
            row.requests
        ]


async def test_groups_of_every_dimension_are_the_rows_own(filled: Filled) -> None:
    engine, events = filled
    by = {
        "tenant": lambda e: (str(e.tenant_id),),
        "project": lambda e: (str(e.project_id),) * 2,
        "key": lambda e: (e.key_id, None),
        "model": lambda e: (e.route,),
        "backend": lambda e: (e.backend or "",),
        "status": lambda e: (e.status,),
        "end_user": lambda e: (e.end_user or "",),
    }
    for names in (["tenant"], ["project"], ["key", "model"], ["backend"], ["status", "tenant"], ["end_user"], list(by)):
        rows = await report(engine, group_by=names)
        found = {
            tuple(
                getattr(row, field) or ("" if field != "key_name" else None) for n in names for field in fields_of(n)
            ): (measures(row))
            for row in rows
        }
        expected = grouped(events, lambda e, names=names: tuple(v for n in names for v in by[n](e)))
        assert found == expected
        assert list(found) == list(expected)


async def test_a_request_counts_for_each_of_its_tags(filled: Filled) -> None:
    engine, events = filled
    apart: dict[str | None, list[UsageEvent]] = {}
    for event in events:
        for tag in event.tags or [None]:
            apart.setdefault(tag, []).append(event)
    rows = await report(engine, group_by=["tag"])
    assert {row.tag: measures(row) for row in rows} == {tag: sums(inside) for tag, inside in apart.items()}
    assert {row.tag for row in await report(engine, group_by=["tag"], tag=["x", "none"])} == {"x"}
    (row,) = await report(engine, tag=["x", "team=red"])
    assert measures(row) == sums(event for event in events if "x" in event.tags)


async def test_filters_let_through_what_fits_all_of_them(filled: Filled) -> None:
    engine, events = filled
    await name_tenants(engine, {TENANTS[0]: "acme", TENANTS[1]: "bolt"})
    acme, bolt = TENANTS[:2]
    cases = [
        ({"tenant": ["acme"]}, lambda e: e.tenant_id == acme),
        ({"tenant": ["acme", str(bolt).upper()]}, lambda e: e.tenant_id in (acme, bolt)),
        ({"project": ["web"]}, lambda e: e.project_id in (project_of(acme, 1), project_of(bolt, 1))),
        ({"project": ["web"], "tenant": ["bolt"]}, lambda e: e.project_id == project_of(bolt, 1)),
        ({"model": ["m"], "status": ["ok", "failed"]}, lambda e: e.route == "m" and e.status in ("ok", "failed")),
        ({"backend": ["", "b1"]}, lambda e: e.backend in (None, "b1")),
        ({"end_user": ["a" * 32]}, lambda e: e.end_user == "a" * 32),
        ({"tag": ["y"], "model": ["n"]}, lambda e: "y" in e.tags and e.route == "n"),
        ({"model": ["nothing"]}, lambda e: False),
        (
            {"day": [BEGIN.date() + timedelta(days=1)], "hour": [BEGIN + timedelta(hours=h) for h in (5, 6, 40)]},
            lambda e: 5 <= (e.admitted_at - BEGIN) / timedelta(hours=1) < 7,
        ),
    ]
    for filters, fits in cases:
        inside = [event for event in events if fits(event)]
        assert [measures(row) for row in await report(engine, **filters)] == ([sums(inside)] if inside else []), filters
    # The key's id is known, its rows are none.
    assert await report(engine, key=["acme-key"]) == []


async def test_what_is_not_there_is_named_and_anothers_looks_the_same(engine: AsyncEngine) -> None:
    await name_tenants(engine, {TENANTS[0]: "acme", TENANTS[1]: "bolt"})
    for parameter, value, own in (
        ("tenant", "nobody", None),
        ("tenant", str(UUID(int=9)), None),
        ("project", "nothing", None),
        ("project", str(project_of(TENANTS[1], 1)), TENANTS[0]),
        ("key", "nokey", None),
        ("key", "bolt-key", TENANTS[0]),
    ):
        with pytest.raises(NotFound, match=value) as caught:
            await usage_report(engine, UsageQuery(**{parameter: [value]}), own=own)
        assert caught.value.parameter == parameter
    assert (await usage_report(engine, UsageQuery(project=[str(project_of(TENANTS[0], 1))]), own=TENANTS[0])).rows == []


async def test_a_tenants_reading_sees_no_other_rows_even_without_a_filter(filled: Filled) -> None:
    engine, events = filled
    async with reading(engine, TENANTS[1]) as connection:
        for query in ("SELECT count(*) FROM usage_events", "SELECT sum(requests) FROM usage_rollup"):
            assert await connection.scalar(text(query)) == sum(event.tenant_id == TENANTS[1] for event in events)


async def test_end_users_go_by_their_own_names_beside_a_tenant(engine: AsyncEngine) -> None:
    await name_tenants(engine, {TENANT: "acme"})
    hashes = {(TENANT, "alice"): "a" * 32, (TENANT, "c" * 32): "d" * 32}
    await write(engine, [usage_event(end_user=end_user) for end_user in ("a" * 32, "d" * 32, "b" * 32, None)])

    async def found(query: UsageQuery) -> list[str | None]:
        with_hash = await usage_report(engine, query, hash_end_user=lambda owner, name: hashes.get((owner, name), "-"))
        return [row.end_user for row in with_hash.rows]  # type: ignore[misc]

    for given_ids, wanted in ((["alice"], ["a" * 32]), (["alice", "b" * 32], ["a" * 32, "b" * 32]), (["eve"], [])):
        assert await found(UsageQuery(tenant=["acme"], end_user=given_ids, group_by=["end_user"])) == wanted
    # An id that looks like a hash is found too.
    assert await found(UsageQuery(tenant=["acme"], end_user=["c" * 32], group_by=["end_user"])) == ["d" * 32]
    with pytest.raises(InvalidReport, match="beside a tenant"):
        await found(UsageQuery(end_user=["alice"]))


async def test_tenants_projects_and_keys_go_by_name(engine: AsyncEngine) -> None:
    await name_tenants(engine, {TENANTS[0]: "acme"})
    named = {"tenant_id": TENANTS[0], "project_id": project_of(TENANTS[0], 2), "key_id": "acme-key"}
    await write(engine, [usage_event(**named), usage_event(tenant_id=TENANTS[1], project_id=UUID(int=7))])
    rows = await report(engine, group_by=["tenant", "project", "key"])
    assert [(row.tenant, row.project, row.project_id, row.key_id, row.key_name) for row in rows] == [
        (str(TENANTS[1]), str(UUID(int=7)), str(UUID(int=7)), "key", None),
        ("acme", "batch", str(project_of(TENANTS[0], 2)), "acme-key", "key of acme"),
    ]


async def test_nothing_used_is_no_row(engine: AsyncEngine) -> None:
    for group_by in ([], ["day"], ["tag"]):
        assert await report(engine, group_by=group_by) == []
    assert await PostgresSums(engine).charged(TENANT, NOON, NOON + timedelta(days=1)) == 0
    assert await dead_event_count(engine) == 0


async def test_a_status_that_was_revised_away_is_gone(engine: AsyncEngine) -> None:
    event = usage_event(status="abandoned", charged_nano_usd=5)
    final = usage_event(request_id=event.request_id, status="ok", charged_nano_usd=8)
    await write(engine, [event])
    async with transaction(engine) as connection:
        await record(connection, [Entry("1-1", b"", final, 2)])
    rows = await report(engine, group_by=["status"])
    assert [(row.status, row.requests, row.charged_nano_usd) for row in rows] == [("ok", 1, 8)]


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
        for group_by in ([], ["hour"], ["day"], ["month"], ["tag"]):
            assert [row.requests for row in await report(engine, start=start, end=end, group_by=group_by)] == [1]
    assert await report(engine, start=first, end=first + timedelta(days=1)) == []
    assert await report(engine, start=last - timedelta(days=1), end=last) == []
    assert await report(engine, day=[first.date(), last.date()], timezone="Pacific/Kiritimati") == []
    assert await report(engine, hour=[first, last]) == []


@pytest.mark.parametrize("own", [None, TENANT])
async def test_a_report_that_takes_too_long_says_what_to_change(
    own: UUID | None, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.billing.reports.REPORT_TIMEOUT_S", 0.2)
    with pytest.raises(InvalidReport, match="closer together"):
        async with reading(engine, own) as connection:
            await connection.execute(text("SELECT pg_sleep(300)"))
