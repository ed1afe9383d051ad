from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing import drainer as drainer_module
from gateway.billing import retention
from gateway.billing.drainer import Drainer
from gateway.billing.entries import Entry
from gateway.billing.ledger import ensure_partition, record
from gateway.billing.retention import drop_old_months
from gateway.db.engine import transaction
from gateway.db.partitions import month_of
from tests.gateway.billing.support import fetch, usage_event
from tests.gateway.db.support import ManualClock

NOW = datetime(2024, 6, 3, 12, 0, tzinfo=UTC)
MONTHS = [datetime(2024, month, 1, tzinfo=UTC) for month in range(1, 7)]
PARTITIONS = """
SELECT inhrelid::regclass::text AS name FROM pg_inherits
WHERE inhparent = 'usage_events'::regclass AND inhrelid::regclass::text < 'usage_events_2024_07'
"""


async def _fill(engine: AsyncEngine, moments: Iterable[datetime], *, quiet: bool = True) -> None:
    """A row at each moment; ``quiet``: as if it had been written long ago."""
    async with transaction(engine, timeout_s=10) as connection:
        for moment in moments:
            await ensure_partition(connection, month_of(moment))
            await record(connection, [Entry("1-0", b"", usage_event(admitted_at=moment), 1)])
        if quiet:
            await connection.execute(text("UPDATE usage_events SET recorded_at = admitted_at"))


async def _months(engine: AsyncEngine) -> list[int]:
    return sorted(int(row["name"][-2:]) for row in await fetch(engine, PARTITIONS))


async def test_whole_months_older_than_kept_are_dropped_and_their_sums_stay(engine: AsyncEngine) -> None:
    last_tick = timedelta(microseconds=1)
    await _fill(engine, [moment for month in MONTHS for moment in (month, month + timedelta(days=28) - last_tick)])
    sums = await fetch(engine, "SELECT * FROM usage_rollup ORDER BY bucket")
    assert await drop_old_months(engine, NOW, 3) == MONTHS[:2]
    assert await _months(engine) == [3, 4, 5, 6]
    assert len(await fetch(engine, "SELECT 1 FROM usage_events")) == 8
    assert await fetch(engine, "SELECT * FROM usage_rollup ORDER BY bucket") == sums
    audited = await fetch(engine, "SELECT actor, action, kind, target, before FROM audit_log ORDER BY id")
    assert [tuple(row.values()) for row in audited] == [
        ("retention", "drop", "ledger_month", name, {"rows": 2}) for name in ("2024-01", "2024-02")
    ]
    assert await drop_old_months(engine, NOW, 3) == []
    # A month later, one more.
    assert await drop_old_months(engine, NOW + timedelta(days=30), 3) == MONTHS[2:3]


async def test_a_month_that_still_gets_rows_is_let_be(engine: AsyncEngine) -> None:
    await _fill(engine, MONTHS[:3])
    await _fill(engine, MONTHS[1:2], quiet=False)
    assert await drop_old_months(engine, NOW, 1) == [MONTHS[0], MONTHS[2]]
    assert await _months(engine) == [2]


async def test_a_month_in_use_is_left_for_the_next_time(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "LOCK_TIMEOUT", "100ms")
    await _fill(engine, MONTHS[:2])
    for statement in (
        "SELECT count(*) FROM usage_events_2024_01",
        "INSERT INTO usage_events SELECT * FROM usage_events_2024_01 ON CONFLICT DO NOTHING",
    ):
        async with transaction(engine, timeout_s=10) as connection:
            await connection.execute(text(statement))
            dropped = await drop_old_months(engine, NOW, 4)
        assert dropped == []
        assert await _months(engine) == [1, 2]
    assert await drop_old_months(engine, NOW, 4) == MONTHS[:1]


async def test_replicas_that_look_at_once_drop_each_month_once(engine: AsyncEngine) -> None:
    await _fill(engine, MONTHS)
    dropped = await asyncio.gather(*(drop_old_months(engine, NOW, 1) for _ in range(4)))
    while await drop_old_months(engine, NOW, 1):
        pass
    assert await _months(engine) == [5, 6]
    assert len(await fetch(engine, "SELECT 1 FROM audit_log")) == 4
    assert sum(map(len, dropped)) <= 4


async def test_the_drainer_drops_them_by_itself(
    engine: AsyncEngine, redis_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _fill(engine, MONTHS)
    assert clock.now() == NOW
    drainer = Drainer(engine, redis_url, clock, interval_s=0.01, keep_months=2)
    await drainer.start()
    try:
        async with asyncio.timeout(20):
            while await _months(engine) != [4, 5, 6]:  # noqa: ASYNC110 - another connection tells no event
                await asyncio.sleep(0.02)
    finally:
        await drainer.close()
    # Without a retention nothing is dropped, however old.
    monkeypatch.setattr(drainer_module, "drop_old_months", None)
    keeping = Drainer(engine, redis_url, ManualClock(time=NOW + timedelta(days=3650)), interval_s=0.01)
    await keeping.start()
    await asyncio.sleep(0.05)
    await keeping.close()
    assert await _months(engine) == [4, 5, 6]
