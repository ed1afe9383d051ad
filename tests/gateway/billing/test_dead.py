from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.dead import DeadEvents, StillDead, UnknownDeadEvent
from gateway.billing.ledger import bury
from gateway.billing.retention import drop_old_months
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from gateway.tenants.audit import Actor
from gateway.tenants.records import NotAllowed
from tests.gateway.billing.support import SHARD, assert_consistent, fetch, usage_event
from tests.gateway.db.support import ManualClock
from tests.gateway.tenants.support import ACTOR

VIEWER = Actor("admin-2", "viewer")
AUDITED = "SELECT action, target, tenant_id, before, after FROM audit_log ORDER BY id"


@pytest.fixture
def dead(engine: AsyncEngine, clock: ManualClock) -> DeadEvents:
    return DeadEvents(engine, clock)


async def _bury(engine: AsyncEngine, *events: UsageEvent | bytes, revision: int | None = 1) -> list[int]:
    async with transaction(engine) as connection:
        for number, event in enumerate(events):
            raw = event if isinstance(event, bytes) else msgspec.json.encode(event)
            await bury(connection, SHARD, f"{number}-{revision}", raw, revision, "it was \x00 cursed")
    return [row["id"] for row in await fetch(engine, "SELECT id FROM dead_usage_events ORDER BY id")]


async def test_dead_events_are_listed_and_shown_as_they_were(engine: AsyncEngine, dead: DeadEvents) -> None:
    ids = await _bury(engine, usage_event(), b"\xff\x00{", usage_event())
    assert await dead.count() == 3
    assert [event.id for event in await dead.list()] == ids
    assert [event.id for event in await dead.list(limit=2)] == ids[:2]
    assert [event.id for event in await dead.list(after=ids[1])] == ids[2:]
    shown = await dead.get(ids[1])
    assert (shown.shard, shown.entry_id, shown.raw, shown.revision) == (SHARD, "1-1", b"\xff\x00{", 1)
    assert shown.error == "it was \N{REPLACEMENT CHARACTER} cursed"
    for unknown in (0, -1, ids[-1] + 1, 2**63, 10**30):
        with pytest.raises(UnknownDeadEvent):
            await dead.get(unknown)


async def test_a_retried_event_becomes_a_row_and_is_dead_no_more(engine: AsyncEngine, dead: DeadEvents) -> None:
    event = usage_event()
    (dead_id,) = await _bury(engine, event, revision=2)
    retried = await dead.retry(ACTOR, dead_id)
    assert (retried.request_id, retried.new) == (event.request_id, True)
    (row,) = await fetch(engine, "SELECT request_id, revision, charged_nano_usd FROM usage_events")
    assert tuple(row.values()) == (event.request_id, 2, 2100)
    assert await dead.list() == []
    await assert_consistent(engine)
    (audited,) = await fetch(engine, AUDITED)
    assert (audited["action"], audited["target"], audited["tenant_id"]) == ("retry", str(dead_id), event.tenant_id)
    assert audited["before"]["entry_id"] == "0-2"
    assert audited["after"] == {"request_id": str(event.request_id), "charged_nano_usd": 2100, "new": True}


async def test_what_the_ledger_has_already_is_not_counted_again(engine: AsyncEngine, dead: DeadEvents) -> None:
    event = usage_event()
    for revision, new in ((2, True), (1, False), (None, False), (2, False)):
        (dead_id,) = await _bury(engine, event, revision=revision)
        assert (await dead.retry(ACTOR, dead_id)).new is new
    assert len(await fetch(engine, "SELECT 1 FROM usage_events")) == 1
    await assert_consistent(engine)


async def test_two_who_retry_one_write_it_once(engine: AsyncEngine, dead: DeadEvents) -> None:
    (dead_id,) = await _bury(engine, usage_event())
    outcomes = await asyncio.gather(*(dead.retry(ACTOR, dead_id) for _ in range(4)), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Retried"] + ["UnknownDeadEvent"] * 3
    await assert_consistent(engine)


async def test_what_still_fails_stays(engine: AsyncEngine, dead: DeadEvents) -> None:
    async with transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE usage_events ADD CONSTRAINT curse CHECK (route <> 'cursed')"))
    unreadable, cursed = await _bury(engine, b"{", usage_event(route="cursed"))
    for dead_id, words in ((unreadable, "not a usage event"), (cursed, "curse")):
        with pytest.raises(StillDead, match=words):
            await dead.retry(ACTOR, dead_id)
    assert await dead.count() == 2
    assert await fetch(engine, AUDITED) == []
    async with transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE usage_events DROP CONSTRAINT curse"))
    assert (await dead.retry(ACTOR, cursed)).new
    await assert_consistent(engine)


async def test_an_event_of_a_month_that_was_dropped_is_not_counted_perhaps_twice(
    engine: AsyncEngine, dead: DeadEvents
) -> None:
    (dead_id,) = await _bury(engine, usage_event(admitted_at=datetime(2023, 5, 6, tzinfo=UTC)))
    async with transaction(engine) as connection:
        partition = "FOR VALUES FROM ('2023-05-01Z') TO ('2023-06-01Z')"
        await connection.execute(text(f"CREATE TABLE usage_events_2023_05 PARTITION OF usage_events {partition}"))
    assert await drop_old_months(engine, datetime(2024, 6, 3, tzinfo=UTC), 6) == [datetime(2023, 5, 1, tzinfo=UTC)]
    with pytest.raises(StillDead, match="2023-05"):
        await dead.retry(ACTOR, dead_id)
    await dead.discard(ACTOR, dead_id)
    assert await dead.count() == 0


async def test_a_discarded_event_is_kept_in_the_audit_log(engine: AsyncEngine, dead: DeadEvents) -> None:
    (dead_id,) = await _bury(engine, b'{"a":"\x00\xff' + b"x" * 100_000)
    await dead.discard(ACTOR, dead_id)
    assert await dead.list() == []
    (audited,) = await fetch(engine, AUDITED)
    assert audited["action"] == "discard"
    assert audited["before"]["raw"].startswith('{"a":"\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}x')
    assert len(audited["before"]["raw"]) <= 10_000
    with pytest.raises(UnknownDeadEvent):
        await dead.discard(ACTOR, dead_id)


async def test_a_viewer_only_looks(engine: AsyncEngine, dead: DeadEvents) -> None:
    (dead_id,) = await _bury(engine, usage_event())
    changes: list[Any] = [dead.retry(VIEWER, dead_id), dead.discard(VIEWER, dead_id)]
    for change in changes:
        with pytest.raises(NotAllowed):
            await change
    assert await dead.count() == 1
