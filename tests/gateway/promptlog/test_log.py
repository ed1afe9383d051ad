"""The writer: it never holds a request up, and what it cannot write is counted by its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from gateway.datakeys import rows
from gateway.db.engine import transaction
from gateway.local.services import EmbeddedRedis
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog import log as log_module
from gateway.promptlog import sealing
from tests.gateway.promptlog.support import ANN, FULL, REDACTED, Rig, account, entry, names
from tests.gateway.promptlog.support import rig as make_rig


async def logged(rig: Rig, tenant_id: UUID) -> list[UUID]:
    return [row.request_id for row in await rig.store.rows(tenant_id, count=10_000, newest_first=False)]


async def test_many_at_once_are_all_written_in_their_order(rig: Rig, acme: UUID, globex: UUID) -> None:
    given = [entry(acme if n % 3 else globex, f"{n}", end_user=ANN if n % 2 else None) for n in range(500)]
    await rig.write(*given)
    for tenant_id in (acme, globex):
        assert await logged(rig, tenant_id) == [each.request_id for each in given if each.tenant_id == tenant_id]
        counted, real = await account(rig, tenant_id)
        assert counted == real > 0
    assert not rig.lost


async def test_recording_waits_for_nothing(rig: Rig, acme: UUID) -> None:
    # Not even for the loop: it is a plain call, and nothing was asked of Redis or Postgres when it returns.
    rig.log.record(FULL, entry(acme))
    assert await names(rig) == set()
    await rig.log.flush()
    assert len(await logged(rig, acme)) == 1


async def test_off_records_nothing(rig: Rig, acme: UUID) -> None:
    await rig.write(entry(acme), policy=PromptLogPolicy())
    assert await names(rig) == set()
    assert not rig.lost


async def test_a_request_is_written_once(rig: Rig, acme: UUID) -> None:
    given = entry(acme)
    await rig.write(given, given)
    await rig.write(given)
    assert await logged(rig, acme) == [given.request_id]
    counted, real = await account(rig, acme)
    assert counted == real


async def test_the_queue_is_bounded_by_count_and_by_bytes(
    rig: Rig, acme: UUID, globex: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "MOST_ENTRIES", 10)
    for _ in range(15):
        rig.log.record(FULL, entry(acme))
    await rig.log.flush()
    assert (len(await logged(rig, acme)), rig.lost) == (10, {"queue_full": 5})
    rig.lost.clear()
    monkeypatch.setattr(log_module, "MOST_BYTES", 100_000)
    big = b"x" * 20_000
    for tenant_id in (acme,) * 5 + (globex,) * 2:
        rig.log.record(FULL, entry(tenant_id, request=big, response=b""))
    await rig.log.flush()
    # One tenant has half of it, so that it can't crowd out the others.
    assert (len(await logged(rig, acme)), len(await logged(rig, globex))) == (12, 2)
    assert rig.lost == {"queue_full": 3}
    await rig.write(entry(acme))
    assert len(await logged(rig, acme)) == 13, "what was written makes room"


async def test_what_was_admitted_too_long_ago_is_left_out(rig: Rig, acme: UUID) -> None:
    await rig.write(entry(acme, admitted_at=datetime.now(UTC) - timedelta(days=2)))
    assert (await logged(rig, acme), rig.lost) == ([], {"too_late": 1})


async def test_what_cannot_be_redacted_is_lost_alone_and_said_without_its_text(
    rig: Rig, acme: UUID, globex: UUID
) -> None:
    bad, good, other = entry(acme, "explode: hunter2"), entry(acme), entry(globex)
    with capture_logs() as logs:
        await rig.write(bad, good, other, policy=REDACTED)
    assert (await logged(rig, acme), await logged(rig, globex)) == ([good.request_id], [other.request_id])
    assert rig.lost == {"redaction": 1}
    assert any(line["event"] == "prompt_not_packed" for line in logs)
    assert "hunter2" not in str(logs)


@pytest.mark.parametrize("size", [10, sealing.LOOP_BYTES])
async def test_long_bodies_are_worked_on_beside_the_loop(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads = 0
    to_thread = asyncio.to_thread

    async def counted(*arguments: object) -> object:
        nonlocal threads
        threads += 1
        return await to_thread(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", counted)
    await rig.write(entry(acme, request=b"x" * size, response=b""))
    assert threads == (size >= sealing.LOOP_BYTES)


async def test_a_fault_of_ours_costs_one_batch(rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.log, "_pack", lambda *_: 1 / 0)
        await rig.write(entry(acme))
    good = entry(acme)
    await rig.write(good)
    assert (await logged(rig, acme), rig.lost) == ([good.request_id], {"fault": 1})


@asynccontextmanager
async def away(rig: Rig, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Postgres hangs whenever it is asked for data keys."""
    monkeypatch.setattr(rows, "transaction", partial(transaction, timeout_s=0.1))
    async with engine.connect() as blocker:
        await blocker.execute(text("LOCK TABLE data_keys"))
        yield


async def test_without_a_key_nothing_is_written(
    rig: Rig, acme: UUID, globex: UUID, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "KEY_RETRY_S", 0.01)
    await rig.write(entry(acme))
    async with away(rig, engine, monkeypatch):
        await rig.write(entry(acme), entry(globex), entry(globex))
    # Acme's key is known for some seconds still.
    assert (len(await logged(rig, acme)), len(await logged(rig, globex))) == (2, 0)
    assert rig.lost == {"keys": 2}


async def test_a_short_outage_of_redis_is_sat_out_and_a_longer_one_costs_what_came(
    engine: AsyncEngine, acme: UUID, services_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = EmbeddedRedis(services_dir, durable=True)
    url = await asyncio.to_thread(redis.start)
    monkeypatch.setattr(log_module, "RETRIES_S", (0.3, 20.0))
    async with make_rig(url, engine, timeout_s=0.2) as rig:
        first = entry(acme)
        await rig.write(first)
        redis.kill()
        sat_out = entry(acme)
        rig.log.record(FULL, sat_out)
        await asyncio.to_thread(redis.start)
        monkeypatch.setattr(log_module, "RETRIES_S", (0.05, 0.05))
        await rig.log.flush()
        assert await logged(rig, acme) == [first.request_id, sat_out.request_id]
        redis.kill()
        with capture_logs() as logs:
            await rig.write(entry(acme), entry(acme))
            rig.log.record(FULL, entry(acme))
        assert rig.lost == {"redis": 2}
        assert [line["reason"] for line in logs if line["event"] == "prompt_log_entries_lost"] == ["redis"]
        await rig.log.flush()
        await asyncio.to_thread(redis.start)
        last = entry(acme)
        await rig.write(last)
        assert (await logged(rig, acme))[-1] == last.request_id
    redis.stop()
    assert rig.lost == {"redis": 3}


async def test_a_redis_that_hangs_costs_entries_and_no_more(
    log_url: str, engine: AsyncEngine, acme: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "RETRIES_S", (0.01,))
    async with make_rig(log_url, engine, timeout_s=0.1) as rig:
        await rig.write(entry(acme))
        await rig.redis.command("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            await rig.write(entry(acme))
            assert rig.lost == {"redis": 1}
            assert len((await rig.reader.page(acme)).entries) == 1
        finally:
            await rig.redis.command("CLIENT", "UNPAUSE")
        last = entry(acme)
        await rig.write(last)
        assert last.request_id in await logged(rig, acme)


async def test_the_end_waits_for_what_was_recorded(log_url: str, engine: AsyncEngine, acme: UUID) -> None:
    async with make_rig(log_url, engine) as rig:
        for _ in range(50):
            rig.log.record(FULL, entry(acme))
    async with make_rig(log_url, engine) as after:
        assert len(await logged(after, acme)) == 50
        rig.log.record(FULL, entry(acme))
    assert rig.lost == {"stopped": 1}


async def test_the_end_does_not_wait_for_ever(
    rig: Rig, acme: UUID, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "STOP_S", 0.05)
    async with engine.connect() as blocker:
        await blocker.execute(text("LOCK TABLE data_keys"))
        for _ in range(log_module.BATCH_ENTRIES + 5):
            rig.log.record(FULL, entry(acme))
        await rig.log.__aexit__(None, None, None)
    assert rig.lost == {"stopped": log_module.BATCH_ENTRIES + 5}
