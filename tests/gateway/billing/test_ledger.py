from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.entries import MAX_KEY_TEXT, BadEntry, Entry, read_entry
from gateway.billing.ledger import quarter_of, record, record_refusals
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from gateway.db.partitions import partition_ddl
from gateway.ids import uuid7
from tests.gateway.billing.support import (
    GOOD,
    NOON,
    TENANT,
    assert_consistent,
    fetch,
    full_event,
    usage_event,
    wild_changes,
)
from tests.gateway.db.support import opened


def entry(event: UsageEvent, revision: int = 1) -> Entry:
    return Entry("1-0", b"", event, revision)


@pytest.fixture(autouse=True)
def partition(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(partition_ddl(NOON))


async def write(engine: AsyncEngine, *entries: Entry) -> int:
    async with transaction(engine, timeout_s=10) as connection:
        return await record(connection, entries)


async def test_a_row_holds_all_that_the_event_says(engine: AsyncEngine) -> None:
    for event in (
        full_event(error_code="backend_error", client_request_id='ünï 🚰 "quoted" \\ ,;\n'),
        usage_event(status="failed", price_id=None),
    ):
        assert await write(engine, entry(event)) == 1
        (row,) = await fetch(engine, f"SELECT * FROM usage_events WHERE request_id = '{event.request_id}'")
        assert row.pop("recorded_at") is not None
        assert row == msgspec.structs.asdict(event) | {"revision": 1}
    await assert_consistent(engine)


async def test_a_revision_replaces_every_column(engine: AsyncEngine) -> None:
    early = usage_event(status="abandoned")
    late = full_event(request_id=early.request_id, status="aborted")
    await write(engine, entry(early))
    assert await write(engine, entry(late, 2)) == 1
    (row,) = await fetch(engine, "SELECT * FROM usage_events")
    assert row.pop("recorded_at") is not None
    assert row == msgspec.structs.asdict(late) | {"revision": 2}
    await assert_consistent(engine)


async def test_the_largest_amounts_add_up(engine: AsyncEngine) -> None:
    largest = 2**53 - 1
    events = [usage_event(charged_nano_usd=largest, cost_nano_usd=largest) for _ in range(1100)]
    assert await write(engine, *map(entry, events)) == 1100
    (row,) = await fetch(engine, "SELECT charged_nano_usd AS charged FROM usage_rollup")
    assert row["charged"] == 1100 * largest > 2**63


async def test_a_repeated_event_changes_nothing(engine: AsyncEngine) -> None:
    event = usage_event()
    assert await write(engine, entry(event), entry(event)) == 1
    assert await write(engine, entry(event), entry(usage_event())) == 1
    assert len(await fetch(engine, "SELECT * FROM usage_events")) == 2
    await assert_consistent(engine)


async def test_revision_two_replaces_the_row_and_moves_the_sums(engine: AsyncEngine) -> None:
    abandoned = usage_event(status="abandoned", completion_tokens=1, charged_nano_usd=100, cost_nano_usd=100)
    final = msgspec.structs.replace(
        abandoned, status="ok", completion_tokens=9, charged_nano_usd=900, cost_nano_usd=950
    )
    await write(engine, entry(abandoned), entry(usage_event()))
    assert await write(engine, entry(final, 2)) == 1
    assert await write(engine, entry(final, 2), entry(abandoned, 1)) == 0
    rows = await fetch(engine, "SELECT status, charged_nano_usd, revision FROM usage_events ORDER BY revision")
    assert [tuple(row.values()) for row in rows] == [("ok", 2100, 1), ("ok", 900, 2)]
    await assert_consistent(engine)


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Settlements of a few requests, some revised, in any order and any number of times."""
    entries = []
    for _ in range(draw(st.integers(1, 5))):
        base = usage_event(
            admitted_at=NOON + timedelta(minutes=draw(st.integers(0, 40))),
            tenant_id=UUID(int=draw(st.integers(1, 2))),
            project_id=UUID(int=draw(st.integers(1, 2))),
            key_id=draw(st.sampled_from(["k1", "k2"])),
            route=draw(st.sampled_from(["m", "n"])),
        )
        for revision in range(1, draw(st.integers(1, 3)) + 1):
            event = msgspec.structs.replace(
                base,
                status=draw(st.sampled_from(["ok", "aborted", "failed", "abandoned", "cache_hit", "replayed"])),
                backend=draw(st.sampled_from([None, "w1", "w2"])),
                prompt_tokens=draw(st.integers(0, 10**12)),
                cache_write_tokens=draw(st.integers(0, 10**12)),
                reasoning_tokens=draw(st.integers(0, 10**12)),
                images=draw(st.integers(0, 10**12)),
                compute_us=draw(st.integers(0, 10**13)),
                charged_nano_usd=draw(st.integers(0, 2**53 - 1)),
            )
            entries += [entry(event, revision)] * draw(st.integers(1, 2))
    return draw(st.permutations(entries))


@given(histories(), st.integers(1, 4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_order_and_any_cut_into_batches_come_to_the_same(
    database_url: str, history: Sequence[Entry], size: int
) -> None:
    async def main() -> None:
        async with opened(database_url, pool_size=1) as engine:
            async with transaction(engine, timeout_s=10) as connection:
                await connection.execute(text("TRUNCATE usage_events, usage_rollup"))
            for start in range(0, len(history), size):
                await write(engine, *history[start : start + size])
            rows = await fetch(engine, "SELECT request_id, revision, status, charged_nano_usd FROM usage_events")
            latest: dict[UUID, Entry] = {}
            for one in history:
                kept = latest.setdefault(one.event.request_id, one)
                if one.revision > kept.revision:
                    latest[one.event.request_id] = one
            assert {row["request_id"]: tuple(row.values())[1:] for row in rows} == {
                request_id: (one.revision, one.event.status, one.event.charged_nano_usd)
                for request_id, one in latest.items()
            }
            await assert_consistent(engine)

    asyncio.run(main())


@given(st.lists(wild_changes(), min_size=1, max_size=8))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_can_be_read_can_be_written(database_url: str, changes: list[dict[str, Any]]) -> None:
    entries = []
    for number, change in enumerate(changes):
        raw = json.dumps(GOOD | {"request_id": str(uuid7())} | change).encode()
        with contextlib.suppress(BadEntry):
            read = read_entry(f"{number}-0", {b"event": raw, b"revision": b"1"}, NOON)
            # Other months need partitions of their own, which is the drainer's business.
            entries.append(replace(read, event=msgspec.structs.replace(read.event, admitted_at=NOON)))

    async def main() -> None:
        async with opened(database_url, pool_size=1) as engine:
            await write(engine, *entries)
            await assert_consistent(engine)

    asyncio.run(main())


async def test_the_longest_names_fit_every_index(engine: AsyncEngine) -> None:
    # Four bytes each, and none alike, because an index compresses what repeats itself.
    shuffler = random.Random(7)
    names = ["".join(chr(shuffler.randint(0x10000, 0x10FFFF)) for _ in range(MAX_KEY_TEXT)) for _ in range(4)]
    event = usage_event(**dict(zip(("key_id", "route", "backend", "end_user"), names, strict=True)))
    assert await write(engine, entry(event)) == 1
    await assert_consistent(engine)


async def test_writers_side_by_side_count_once_and_do_not_deadlock(engine: AsyncEngine) -> None:
    events = [
        usage_event(tenant_id=UUID(int=number % 3), admitted_at=NOON + timedelta(minutes=number))
        for number in range(60)
    ]
    shuffler = random.Random(7)

    async def writer() -> int:
        total = 0
        for _ in range(4):
            batch = shuffler.sample(events, 40)
            total += await write(engine, *(entry(one, shuffler.randint(1, 2)) for one in batch))
        return total

    await asyncio.gather(*(writer() for _ in range(6)))
    rows = await fetch(engine, "SELECT request_id FROM usage_events")
    assert len(rows) == len({row["request_id"] for row in rows}) == 60
    await assert_consistent(engine)


async def test_a_write_that_is_rolled_back_leaves_rollups_as_they_were(engine: AsyncEngine) -> None:
    await write(engine, entry(usage_event()))

    class Crash(Exception):
        pass

    try:
        async with transaction(engine) as connection:
            await record(connection, [entry(usage_event())])
            raise Crash
    except Crash:
        pass
    assert len(await fetch(engine, "SELECT * FROM usage_events")) == 1
    await assert_consistent(engine)


async def test_a_batch_of_refusals_counts_once(engine: AsyncEngine) -> None:
    bucket = quarter_of(NOON)
    counts = {(bucket, TENANT, "k", "budget"): 3, (bucket, TENANT, "k", "requests_per_minute"): 1}
    first, second = uuid7(), uuid7()
    for batch, new in ((first, True), (first, False), (second, True), (first, False)):
        async with transaction(engine) as connection:
            assert await record_refusals(connection, batch, counts) is new
    rows = await fetch(engine, "SELECT reason, count FROM refusals ORDER BY reason")
    assert [tuple(row.values()) for row in rows] == [("budget", 6), ("requests_per_minute", 2)]


@given(st.integers(0, 4 * 10**9).map(lambda seconds: NOON.fromtimestamp(seconds, NOON.tzinfo)))
def test_a_quarter_hour_holds_its_moments(moment: object) -> None:
    begin = quarter_of(moment)  # type: ignore[arg-type]
    assert begin <= moment < begin + timedelta(minutes=15)  # type: ignore[operator]
    assert (begin.minute % 15, begin.second, begin.microsecond) == (0, 0, 0)
