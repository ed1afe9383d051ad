from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing import drainer as drainer_module
from gateway.billing.drainer import Drainer
from gateway.billing.ledger_writer import RawEntry
from gateway.clock import SystemClock
from gateway.db.engine import transaction
from tests.gateway.billing.support import (
    NOON,
    SHARD,
    TENANT,
    Stream,
    assert_consistent,
    eventually,
    fetch,
    rows_of,
    running,
    usage_event,
)
from tests.gateway.db.support import ManualClock


@pytest.fixture
async def drainer(engine: AsyncEngine, redis_url: str, clock: ManualClock) -> AsyncIterator[Drainer]:
    """Drains only when a test calls it."""
    drainer = Drainer(engine, redis_url, clock)
    yield drainer
    await drainer.close()


async def test_entries_become_rows_and_leave_redis(engine: AsyncEngine, drainer: Drainer, stream: Stream) -> None:
    events = [usage_event() for _ in range(3)]
    for event in events:
        stream.add(event)
    assert await drainer.drain_once() == 3
    assert [row["request_id"] for row in await rows_of(engine)] == sorted(event.request_id for event in events)
    assert len(stream) == 0
    assert await drainer.drain_once() == 0
    await assert_consistent(engine)


async def test_an_emptied_stream_is_let_be(
    drainer: Drainer, stream: Stream, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.add(usage_event())
    await drainer.drain_once()
    assert client.exists(f"{SHARD}:usage")
    monkeypatch.setattr(drainer, "_take", None)
    assert await drainer.drain_once() == 0


async def test_every_shard_is_drained(engine: AsyncEngine, drainer: Drainer, client: redis.Redis) -> None:
    for number in range(64):
        Stream(client, f"{{s{number:02d}}}").add(usage_event())
    assert await drainer.drain_once() == 64
    assert len(await rows_of(engine)) == 64


async def test_more_than_a_batch_is_drained_in_one_pass(
    engine: AsyncEngine, drainer: Drainer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer_module, "BATCH", 10)
    stream.add_all(usage_event() for _ in range(35))
    assert await drainer.drain_once() == 35
    assert len(await rows_of(engine)) == 35
    await assert_consistent(engine)


async def test_shards_share_a_batch_of_which_each_has_its_part(
    engine: AsyncEngine, drainer: Drainer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer_module, "BATCH", 12)
    sizes = []
    write = drainer._writer.write

    async def count(batch: Mapping[str, Sequence[RawEntry]]) -> dict[str, Exception]:
        sizes.append([len(entries) for entries in batch.values()])
        return await write(batch)

    monkeypatch.setattr(drainer._writer, "write", count)
    for number, entries in enumerate((1, 5, 30)):
        Stream(client, f"{{s{number:02d}}}").add_all(usage_event() for _ in range(entries))
    assert await drainer.drain_once() == 36
    assert sizes == [[1, 4, 4], [1, 6], [12], [8]]
    assert len(await rows_of(engine)) == 36
    assert client.keys("*:drainer") == []
    await assert_consistent(engine)


async def test_a_shard_that_cannot_be_written_holds_up_no_other(
    engine: AsyncEngine, drainer: Drainer, client: redis.Redis
) -> None:
    async with transaction(engine) as connection:
        await connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE 'not now' USING ERRCODE = 'feature_not_supported'; END $$"
            )
        )
        await connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON usage_events FOR EACH ROW "
                "WHEN (NEW.route = 'refused') EXECUTE FUNCTION refuse()"
            )
        )
    streams = [Stream(client, f"{{s{number:02d}}}") for number in range(3)]
    for stream, route in zip(streams, ("m", "refused", "m"), strict=True):
        stream.add_all(usage_event(route=route) for _ in range(2))
    with pytest.raises(Exception, match="not now"):
        await drainer.drain_once()
    assert [len(stream) for stream in streams] == [0, 2, 0]
    assert len(await rows_of(engine)) == 4
    assert await fetch(engine, "SELECT * FROM dead_usage_events") == []
    assert client.keys("*:drainer") == []
    await assert_consistent(engine)


async def test_revisions_may_come_in_either_order(engine: AsyncEngine, drainer: Drainer, stream: Stream) -> None:
    early, late = (usage_event(status="abandoned", charged_nano_usd=1) for _ in range(2))
    for event, order in ((early, (2, 1)), (late, (1, 2))):
        for revision in order:
            final = msgspec.structs.replace(event, status="ok", charged_nano_usd=5) if revision == 2 else event
            stream.add(final, revision)
            await drainer.drain_once()
    assert [(row["status"], row["revision"]) for row in await rows_of(engine)] == [("ok", 2)] * 2
    await assert_consistent(engine)


POISON = {
    "no json": b"{",
    "empty": b"",
    "another shape": b'{"hello": "world"}',
    "not utf-8": b"\xff\xfe\x00",
    "negative": msgspec.json.encode(usage_event(charged_nano_usd=-1)),
    "huge": msgspec.json.encode(usage_event(prompt_tokens=2**63)),
    "no zone": msgspec.json.encode(usage_event()).replace(b"Z", b""),
    "far future": msgspec.json.encode(usage_event(admitted_at=NOON + timedelta(days=400))),
    "long key": msgspec.json.encode(usage_event(key_id="k" * 100_000)),
    "deep": b"[" * 100_000,
}


async def test_poisoned_entries_are_set_aside_and_stop_nothing(
    engine: AsyncEngine, drainer: Drainer, stream: Stream, client: redis.Redis
) -> None:
    good = []
    ids = {}
    for kind, raw in POISON.items():
        good.append(usage_event())
        stream.add(good[-1])
        ids[stream.add(raw)] = kind
    ids[stream.add(usage_event(), "many")] = "revision"
    client.xadd(f"{SHARD}:usage", {"unrelated": "\x00"})
    assert await drainer.drain_once() == 2 * len(POISON) + 2
    assert len(stream) == 0
    assert [row["request_id"] for row in await rows_of(engine)] == sorted(event.request_id for event in good)
    dead = await fetch(engine, "SELECT * FROM dead_usage_events ORDER BY id")
    assert len(dead) == len(POISON) + 2
    for row in dead[:-2]:
        assert row["raw"] == POISON[ids[row["entry_id"]]]
        assert row["shard"] == SHARD
        assert row["error"]
    await assert_consistent(engine)


async def test_strange_characters_are_cleaned_not_set_aside(
    engine: AsyncEngine, drainer: Drainer, stream: Stream
) -> None:
    raw = msgspec.json.encode(usage_event(client_request_id="@@", error_code="x" * 10_000))
    stream.add(raw.replace(b"@@", rb"a\u0000\ud800z"))
    await drainer.drain_once()
    (row,) = await rows_of(engine)
    assert row["client_request_id"] == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}z"
    assert await fetch(engine, "SELECT * FROM dead_usage_events") == []


async def test_a_row_that_postgres_alone_refuses_is_found_and_set_aside(
    engine: AsyncEngine, drainer: Drainer, stream: Stream
) -> None:
    async with transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE usage_events ADD CHECK (route <> 'cursed')"))
    cursed = [stream.add(usage_event(route=route)) for route in ("m", "cursed", "m", "cursed", "m")][1::2]
    assert await drainer.drain_once() == 5
    assert len(await rows_of(engine)) == 3
    dead = await fetch(engine, "SELECT entry_id, error FROM dead_usage_events ORDER BY id")
    assert [row["entry_id"] for row in dead] == cursed
    assert "check constraint" in dead[0]["error"]
    await assert_consistent(engine)


async def test_a_schema_that_does_not_fit_sets_nothing_aside(
    engine: AsyncEngine, drainer: Drainer, stream: Stream
) -> None:
    stream.add(usage_event())
    async with transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE usage_rollup RENAME TO elsewhere"))
    with pytest.raises(Exception, match="usage_rollup"):
        await drainer.drain_once()
    assert len(stream) == 1
    assert await fetch(engine, "SELECT * FROM dead_usage_events") == []
    async with transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE elsewhere RENAME TO usage_rollup"))
    assert await drainer.drain_once() == 1
    assert len(await rows_of(engine)) == 1


async def test_two_drainers_at_once_write_each_row_once(
    engine: AsyncEngine, redis_url: str, stream: Stream, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer_module, "BATCH", 20)
    drainers = [Drainer(engine, redis_url, clock) for _ in range(3)]
    # Without their lock, as when its lease ran out under each of them.
    monkeypatch.setattr(drainer_module.ShardLock, "acquire", _always)
    stream.add_all(usage_event(tenant_id=UUID(int=number % 5)) for number in range(150))
    drained = await asyncio.gather(*(drainer.drain_once() for drainer in drainers))
    assert sum(drained) == 150
    assert len(stream) == 0
    assert len(await rows_of(engine)) == 150
    await assert_consistent(engine)
    for drainer in drainers:
        await drainer.close()


async def _always(*_: object, **__: object) -> bool:
    return True


async def test_a_shard_is_drained_by_one_at_a_time(
    engine: AsyncEngine, drainer: Drainer, stream: Stream, client: redis.Redis
) -> None:
    stream.add(usage_event())
    client.set(f"{SHARD}:drainer", "another", px=60_000)
    assert await drainer.drain_once() == 0
    client.delete(f"{SHARD}:drainer")
    assert await drainer.drain_once() == 1
    assert client.get(f"{SHARD}:drainer") is None


async def test_a_crash_between_commit_and_acknowledgement_counts_once(
    engine: AsyncEngine, redis_url: str, stream: Stream, clock: ManualClock, client: redis.Redis
) -> None:
    event = usage_event()
    stream.add(event)
    stream.add(b"poison")
    client.hset(f"{SHARD}:refusals", f"{TENANT}|k|budget|{int(NOON.timestamp())}", "4")

    class Crash(BaseException):
        pass

    async def crash(*_: object, **__: object) -> int:
        raise Crash

    for point in ("_acknowledge", "_forget_refusals"):
        crashing = Drainer(engine, redis_url, clock)
        setattr(crashing, point, crash)
        with pytest.raises(Crash):
            await crashing.drain_once()
        client.delete(f"{SHARD}:drainer")
        await crashing.close()
    assert len(await rows_of(engine)) == 1

    whole = Drainer(engine, redis_url, clock)
    stream.add(usage_event())
    client.hset(f"{SHARD}:refusals", f"{TENANT}|k|budget|{int(NOON.timestamp())}", "1")
    for _ in range(2):
        await whole.drain_once()
    await whole.close()
    assert len(await rows_of(engine)) == 2
    assert len(await fetch(engine, "SELECT * FROM dead_usage_events")) == 1
    assert [row["count"] for row in await fetch(engine, "SELECT count FROM refusals")] == [5]
    assert client.keys("*refusals*") == []
    await assert_consistent(engine)


_KILLED = """
import asyncio, sys
from gateway.billing import drainer as module
from gateway.clock import SystemClock
from gateway.db.engine import create_engine

async def main():
    module.BATCH = 5
    drainer = module.Drainer(create_engine(sys.argv[1]), sys.argv[2], SystemClock())
    acknowledge = drainer._acknowledge
    async def announce(shard, batch):
        print("committed", flush=True)
        await asyncio.sleep(float(sys.argv[3]))
        return await acknowledge(shard, batch)
    drainer._acknowledge = announce
    await drainer.drain_once()

asyncio.run(main())
"""


async def test_a_drainer_killed_after_its_commit_leaves_the_rest_to_another(
    engine: AsyncEngine, database_url: str, redis_url: str, stream: Stream, clock: ManualClock, client: redis.Redis
) -> None:
    stream.add_all(usage_event() for _ in range(12))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, database_url, redis_url, "60", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while (line := await process.stdout.readline()) != b"committed\n":
        assert line, "it ended before its commit"
    process.kill()
    await process.wait()
    assert (len(stream), len(await rows_of(engine))) == (12, 5)

    lease_ms = client.pttl(f"{SHARD}:drainer")
    assert 0 < lease_ms <= drainer_module.LOCK_LEASE_S * 1000
    client.delete(f"{SHARD}:drainer")
    other = Drainer(engine, redis_url, clock)
    assert await other.drain_once() == 12
    await other.close()
    assert len(await rows_of(engine)) == 12
    await assert_consistent(engine)


async def test_a_row_makes_the_partition_it_needs(
    engine: AsyncEngine, redis_url: str, stream: Stream, client: redis.Redis
) -> None:
    past, present = datetime(2021, 3, 31, 23, 59, tzinfo=UTC), datetime.now(UTC)
    clock = ManualClock(time=present)
    drainers = [Drainer(engine, redis_url, clock) for _ in range(2)]
    # Two make the same partitions at once, from two shards.
    for moment in (past, present):
        for each in (stream, Stream(client, "{s08}")):
            each.add(usage_event(admitted_at=moment))
    assert sum(await asyncio.gather(*(drainer.drain_once() for drainer in drainers))) == 4
    names = await fetch(engine, "SELECT DISTINCT tableoid::regclass::text AS name FROM usage_events ORDER BY name")
    assert [row["name"] for row in names] == ["usage_events_2021_03", f"usage_events_{present:%Y_%m}"]

    # Dropped under a drainer that knows it: made again, nothing set aside.
    async with transaction(engine) as connection:
        await connection.execute(text("DROP TABLE usage_events_2021_03"))
    stream.add(usage_event(admitted_at=past))
    for drainer in drainers:
        await drainer.drain_once()
        await drainer.close()
    assert await fetch(engine, "SELECT * FROM dead_usage_events") == []
    assert len(await rows_of(engine)) == 3


async def test_partitions_are_made_ahead_as_time_passes(
    engine: AsyncEngine, drainer: Drainer, clock: ManualClock
) -> None:
    clock.time = datetime(2031, 12, 31, tzinfo=UTC)
    await drainer.drain_once()
    clock.advance(drainer_module.MAINTENANCE_S)
    clock.time = datetime(2032, 1, 1, tzinfo=UTC)
    await drainer.drain_once()
    tables = await fetch(engine, "SELECT relname FROM pg_class WHERE relname ~ '^usage_events_203._..$' ORDER BY 1")
    assert [row["relname"][-7:] for row in tables] == ["2031_12", "2032_01", "2032_02", "2032_03"]


async def test_partitions_that_cannot_be_made_ahead_hold_up_norows_of(
    engine: AsyncEngine, drainer: Drainer, stream: Stream, clock: ManualClock
) -> None:
    async with transaction(engine) as connection:
        overlap = "FOR VALUES FROM ('2024-08-10Z') TO ('2024-08-11Z')"
        await connection.execute(text(f"CREATE TABLE in_the_way PARTITION OF usage_events {overlap}"))
    for _ in range(2):
        stream.add(usage_event())
        assert await drainer.drain_once() == 1
    async with transaction(engine) as connection:
        await connection.execute(text("DROP TABLE in_the_way"))
    clock.advance(drainer_module.MAINTENANCE_RETRY_S)
    await drainer.drain_once()
    assert await fetch(engine, "SELECT 1 FROM pg_inherits WHERE inhrelid = 'usage_events_2024_08'::regclass")


async def test_refusals_are_added_up(engine: AsyncEngine, drainer: Drainer, client: redis.Redis) -> None:
    quarter = int(NOON.timestamp())
    for count in (3, 4):
        client.hset(f"{SHARD}:refusals", f"{TENANT}|k|budget|{quarter}", str(count))
        client.hset(f"{SHARD}:refusals", f"{TENANT}|k|requests_per_minute|{quarter}", "1")
        client.hset(f"{SHARD}:refusals", "nonsense", "1")
        client.hset(f"{SHARD}:refusals", f"{TENANT}|{'k' * 5000}|budget|{quarter}", "1")
        client.hset(f"{SHARD}:refusals", f"{TENANT}|k|budget|99999999999999", "1")
        await drainer.drain_once()
    rows = await fetch(engine, "SELECT * FROM refusals ORDER BY reason")
    assert [(row["bucket"], row["tenant_id"], row["key_id"], row["count"]) for row in rows] == [
        (NOON, TENANT, "k", 7),
        (NOON, TENANT, "k", 2),
    ]
    assert client.keys() == []


async def test_it_drains_by_itself(engine: AsyncEngine, redis_url: str, stream: Stream) -> None:
    async with running(engine, redis_url):
        for expected in (1, 2):
            stream.add(usage_event())
            await eventually(engine, expected)
        stream.add(usage_event())
    # The last pass takes what came while it was closed.
    assert len(await rows_of(engine)) == 3


async def test_the_default_interval_is_below_a_second(engine: AsyncEngine, redis_url: str) -> None:
    drainer = Drainer(engine, redis_url, SystemClock())
    assert drainer._interval_s <= 0.5
    await drainer.close()
