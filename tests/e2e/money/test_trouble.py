"""Things that die under load: afterwards the ledger has what clients know of, all sums agree, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.tenants.directory import LimitSpec
from tests.e2e.money.fleet import CHARGE, Answer, Fleet, count, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="package")]

OUTAGE_S = float(os.environ.get("PENSTOCK_TEST_OUTAGE_S", "3"))
"""How long Postgres is away: 3 s, to be quick; the promise is made for 20."""
STREAMS = 20
LIMITS = (
    LimitSpec(metric="budget", window="month", amount=10**15),
    LimitSpec(metric="budget", window="total", amount=10**15, subject="key"),
    LimitSpec(metric="requests", window="hour", amount=10**6, subject="project", target="default"),
    LimitSpec(metric="tokens", window="minute", amount=10**9, subject="model", target="m"),
    LimitSpec(metric="concurrent", amount=1000, subject="key"),
)


async def enough(answers: Sequence[Answer], more: int, outcome: str = "ok") -> None:
    """Wait until so many more requests came to that."""
    before = count(answers)[outcome]
    await until(lambda: count(answers)[outcome] >= before + more, f"{more} more {outcome}")


async def account(fleet: Fleet, tenant: str, answers: Sequence[Answer]) -> list[Any]:
    """Every row is a request that a client knows of; every answer that a client got has its row, and one only."""
    found = await fleet.settled()
    assert (found.differences, found.busy, found.running) == ([], [], 0)
    assert found.dead == 0
    rows = await fleet.rows(tenant)
    by_sent = Counter(row.client_request_id for row in rows)
    sent = {answer.sent_id for answer in answers}
    assert by_sent.keys() <= sent
    assert set(by_sent.values()) <= {1}
    status = {row.client_request_id: row for row in rows}
    for answer in answers:
        row = status.get(answer.sent_id)
        if answer.outcome == "ok":
            assert row is not None, answer
            assert (row.status, row.charged_nano_usd, str(row.request_id)) == ("ok", CHARGE, answer.request_id)
        elif answer.outcome == "cut":
            assert row is not None, answer
            assert row.charged_nano_usd <= CHARGE
    unheard = sum(row.client_request_id in {a.sent_id for a in answers if a.outcome == "unknown"} for row in rows)
    print(f"{tenant}: {count(answers)}, {len(rows)} rows {dict(Counter(row.status for row in rows))}, "
          f"{unheard} of requests whose client heard nothing")  # fmt: skip
    await fleet.verify_command()
    return rows


async def test_a_gateway_is_killed_with_twenty_streams_open(fleet: Fleet) -> None:
    key, held_key = await fleet.tenant("killed", *LIMITS), await fleet.tenant("killed-streams", *LIMITS)
    async with fleet.load(key, clients=6) as answers:
        await enough(answers, 10)
        fleet.backend.hold(midway=True)
        held = [asyncio.create_task(fleet.ask(held_key, 2, stream=True)) for _ in range(STREAMS)]
        await until(lambda: fleet.backend.streaming >= STREAMS, "the streams are open")
        await asyncio.sleep(1.2)  # two heartbeats: what they used so far is in Redis
        victim = fleet.replicas[2]
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
        cut = [await task for task in held]
        fleet.backend.release()
        await enough(answers, 10)
        fleet.replicas[2] = fleet.launch()
        await fleet.replicas[2].ready()
        await enough(answers, 10)
    assert {answer.outcome for answer in cut} == {"cut"}
    rows = await account(fleet, "killed-streams", cut)
    assert len(rows) == STREAMS
    assert {(row.status, row.completion_tokens, row.charged_nano_usd) for row in rows} == {
        ("abandoned", 3, 9 * 1000 + 3 * 2000)
    }
    await account(fleet, "killed", answers)


async def test_redis_is_killed(fleet: Fleet) -> None:
    key = await fleet.tenant("redis-killed", *LIMITS)
    async with fleet.load(key) as answers:
        await enough(answers, 20)
        await asyncio.to_thread(fleet.redis.kill)
        await enough(answers, 6, "refused")
        await asyncio.to_thread(fleet.redis.start)
        await enough(answers, 20)
    await account(fleet, "redis-killed", answers)


async def test_redis_is_flushed_while_streams_are_open(fleet: Fleet) -> None:
    import redis

    key = await fleet.tenant("flushed", *LIMITS)
    async with fleet.load(key, clients=3) as answers:
        await enough(answers, 20)
        fleet.backend.hold(midway=True)
        held = [asyncio.create_task(fleet.ask(key, number, stream=True)) for number in range(9)]
        await until(lambda: fleet.backend.streaming >= 9, "the streams are open")
        with contextlib.closing(redis.Redis.from_url(fleet.redis.url)) as client:
            client.flushall()
        await asyncio.sleep(1.5)  # more than a heartbeat: what runs is back
        fleet.backend.release()
        answers += [await task for task in held]
        await enough(answers, 20)
    assert {task.result().outcome for task in held} == {"ok"}
    # What had ended and was not drained at that moment is sent anew by its gateway; so nothing is lost.
    await account(fleet, "flushed", answers)


async def test_postgres_is_killed(fleet: Fleet) -> None:
    key = await fleet.tenant("postgres-killed", *LIMITS)
    async with fleet.load(key) as answers:
        await enough(answers, 20)
        for number in range(3):  # each gateway has seen the key
            answers.append(await fleet.ask(key, number))
        before, seen = count(answers), len(answers)  # a shard that Redis lost in another test was opened meanwhile
        await asyncio.to_thread(fleet.postgres.kill)
        await asyncio.sleep(OUTAGE_S)
        during = count(answers)
        await asyncio.to_thread(fleet.postgres.start)
        await enough(answers, 20)
    assert during["ok"] > before["ok"]
    assert {(answer.status, answer.code, answer.told) for answer in answers[seen:]} == {(200, None, None)}, (
        "requests go on all the time"
    )
    assert count(answers)["cut"] == count(answers)["unknown"] == 0
    await account(fleet, "postgres-killed", answers)
