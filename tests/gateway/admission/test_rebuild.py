from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.admission.errors import Refused
from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.admission.ticket import Draft
from gateway.billing.drainer import Drainer
from gateway.billing.ledger_sums import PostgresSums
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.db.engine import create_engine
from gateway.ids import uuid7
from tests.gateway.admission.support import (
    DRAFT,
    TARIFF,
    Ledger,
    admission,
    advance,
    eventually,
    limit,
    on_both,
    take,
    tenant,
    totals,
)

ADA = Draft("tiny", TARIFF, end_user="ada")
EVER = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


@on_both
async def test_a_budget_given_in_mid_period_counts_what_was_spent_before(gate: Admission, ledger: Ledger) -> None:
    tenant_id = uuid7()
    free = tenant(tenant_id=tenant_id)
    drained, undrained, running = [await take(gate, free, 30_000) for _ in range(3)]
    drained.settle("ok", TokenUsage(10, 0))
    await drained.settled()
    ledger.drain(free.shard)
    undrained.settle("ok", TokenUsage(0, 10))
    await undrained.settled()
    limited = tenant(budget=70_000, tenant_id=tenant_id, generation=2)
    with pytest.raises(Refused):
        await take(gate, limited, 10_001)
    await take(gate, limited, 10_000)
    counters = await totals(gate, tenant_id)
    assert (counters.spent, counters.reserved) == (30_000, 40_000)
    running.settle("ok", TokenUsage(5, 0))  # reserved before there was a budget
    await running.settled()
    counters = await totals(gate, tenant_id)
    assert (counters.spent, counters.reserved) == (35_000, 10_000)


async def test_a_budget_taken_away_and_given_back(gate: Admission, ledger: Ledger) -> None:
    tenant_id = uuid7()
    for budget in (100_000, None, 100_000):
        principal = tenant(budget=budget, tenant_id=tenant_id)
        ticket = await take(gate, principal, 20_000)
        ticket.settle("ok", TokenUsage(10, 0))
        await ticket.settled()
    assert (await totals(gate, tenant_id)).spent == 30_000


async def test_another_kind_of_period_is_counted_anew(gate: Admission, ledger: Ledger) -> None:
    tenant_id = uuid7()
    for kind in ("day", "month", "day", "total"):
        principal = tenant(budget=(10**6, kind), tenant_id=tenant_id)  # type: ignore[arg-type]
        ticket = await take(gate, principal, 20_000)
        ticket.settle("ok", TokenUsage(10, 0))
        await ticket.settled()
    assert (await totals(gate, tenant_id, "total")).spent == 40_000
    assert ledger.readings == 4


@on_both
async def test_the_ledger_is_read_once_a_period(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(budget=(10**9, "day"))
    async with admission(redis_url, ledger) as one, admission(redis_url, ledger) as two:
        await asyncio.gather(*(take(one, principal, 1) for _ in range(20)))
        await take(two, principal, 1)
        assert ledger.readings == 1
        advance(86_400, one, two)
        await take(two, principal, 1)
        await take(one, principal, 1)
        assert ledger.readings == 2


async def test_the_drainer_may_run_between_stream_and_ledger(redis_url: str) -> None:
    """The row is in both for a moment; and it may move just after the stream was read."""

    class Moving(Ledger):
        async def read(self) -> None:
            await super().read()
            self.drain(shard)

    ledger = Moving(redis_url)
    tenant_id = uuid7()
    free, limited = tenant(tenant_id=tenant_id), tenant(budget=10**9, tenant_id=tenant_id, generation=2)
    shard = free.shard
    async with admission(redis_url, ledger) as gate:
        for _ in range(3):
            ticket = await take(gate, free)
            ticket.settle("ok", TokenUsage(10, 0))
            await ticket.settled()
        await take(gate, limited)
        assert (await totals(gate, tenant_id)).spent == 30_000


async def test_a_settlement_during_the_reading_is_not_missed(redis_url: str) -> None:
    class Interrupted(Ledger):
        async def charged(self, *which: Any, **whose: Any) -> int:
            total = await super().charged(*which, **whose)
            if running:
                ticket = running.pop()
                ticket.settle("ok", TokenUsage(10, 0))
                await ticket.settled()
                self.drain(free.shard)
            return total

    ledger = Interrupted(redis_url)
    async with admission(redis_url, ledger) as gate:
        tenant_id = uuid7()
        free, limited = tenant(tenant_id=tenant_id), tenant(budget=10**9, tenant_id=tenant_id, generation=2)
        running = [await take(gate, free, 10_000) for _ in range(4)]
        await take(gate, limited, 0)
        counters = await totals(gate, tenant_id)
        assert (counters.spent, counters.reserved) == (40_000, 0)
        assert ledger.readings == 5

        # If they never stop, the request is refused rather than admitted on a guess.
        tenant_id = uuid7()
        free, limited = tenant(tenant_id=tenant_id), tenant(budget=10**9, tenant_id=tenant_id, generation=2)
        running = [await take(gate, free, 10_000) for _ in range(60)]
        with pytest.raises(RedisUnavailable, match="kept ending"):
            await take(gate, limited, 0)


@pytest.mark.parametrize("late", [False, True])
async def test_an_event_that_comes_after_the_stream_was_read_is_counted_once(redis_url: str, late: bool) -> None:
    """It stays in the stream, so that the script itself finds it; a revision makes it all be read again."""

    class Interrupted(Ledger):
        async def charged(self, *which: Any, **whose: Any) -> int:
            total = await super().charged(*which, **whose)
            while running:
                ticket = running.pop()
                ticket.settle("ok", TokenUsage(10, 5))
                await ticket.settled()
            return total

    ledger = Interrupted(redis_url)
    async with admission(redis_url, ledger) as gate:
        tenant_id = uuid7()
        free = tenant(tenant_id=tenant_id)
        running = [await take(gate, free, 10_000, draft) for draft in (DRAFT, DRAFT, ADA)]
        if late:
            advance(10, gate)
            assert await gate.expire_leases() == 3
            ledger.drain(free.shard)
        whole, hers = limit("budget", 10**9, "month"), limit("budget", 10**9, "month", "end_user")
        limited = tenant(None, None, None, whole, hers, tenant_id=tenant_id, generation=2)
        await take(gate, limited, 1, ADA)
        found = await gate.counters(tenant_id)
        assert {each.counter.subject: (each.spent, each.reserved) for each in found.budgets} == {
            "tenant": (60_000, 1),
            "end_user": (20_000, 1),
        }


async def test_a_late_revision_replaces_the_first_in_the_sum(gate: Admission, ledger: Ledger) -> None:
    tenant_id = uuid7()
    free, limited = tenant(tenant_id=tenant_id), tenant(budget=10**9, tenant_id=tenant_id, generation=2)
    ticket = await take(gate, free)
    ticket.checkpoint(TokenUsage(10, 0), "w1")
    await gate._leases.renew()
    advance(10, gate)
    await gate.expire_leases()
    ledger.drain(free.shard)
    ticket.settle("ok", TokenUsage(50, 0))
    await ticket.settled()
    await take(gate, limited)
    assert (await totals(gate, tenant_id)).spent == 50_000


async def test_a_ledger_that_cannot_be_read_admits_nobody(redis_url: str) -> None:
    class Broken(Ledger):
        async def read(self) -> None:
            await super().read()
            await asyncio.sleep(0.1)
            raise ConnectionError("Postgres is away")

    ledger = Broken(redis_url)
    async with admission(redis_url, ledger) as gate:
        principal = tenant(budget=10**9)
        outcomes = await asyncio.gather(*(take(gate, principal, 1) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(outcome, ConnectionError) for outcome in outcomes)
        assert ledger.readings == 1  # nobody waits for Postgres after another did in vain
        await take(gate, tenant(slots=1))


async def test_those_who_waited_go_on_when_the_first_reader_is_cancelled(redis_url: str) -> None:
    class Slow(Ledger):
        async def read(self) -> None:
            await super().read()
            await asyncio.sleep(0.2)

    ledger = Slow(redis_url)
    async with admission(redis_url, ledger) as gate:
        principal = tenant(budget=10**9)
        first, second = [asyncio.ensure_future(take(gate, principal, 1)) for _ in range(2)]

        async def reading() -> bool:
            return ledger.readings > 0

        await eventually(reading)
        first.cancel()
        await second
        assert ledger.readings == 2


@on_both
async def test_with_the_real_ledger_and_its_drainer_at_work(redis_url: str, database_url: str) -> None:
    """Budgets are counted anew again and again while rows move from Redis to Postgres; no cent is lost or doubled."""
    engine = create_engine(database_url)
    drainer = Drainer(engine, redis_url, SystemClock(), interval_s=60)
    tenant_id = uuid7()
    ledger = PostgresSums(engine)

    async def keep_draining() -> None:
        while not done.is_set():
            await drainer.drain_once()

    done = asyncio.Event()
    charged = 0
    async with admission(redis_url, ledger) as gate:
        draining = asyncio.ensure_future(keep_draining())
        try:
            for turn in range(12):
                kind = ("month", "total", "week")[turn % 3]
                principal = tenant(budget=(10**12, kind), tenant_id=tenant_id)  # type: ignore[arg-type]
                tickets = [await take(gate, principal, 50_000) for _ in range(5)]
                for ticket in tickets[1:]:
                    ticket.settle("ok", TokenUsage(random.randrange(40), random.randrange(20)))
                    charged += ticket.charged_nano_usd
                    if turn % 2:
                        await ticket.settled()
                await take(gate, principal, 0)
                counters = await totals(gate, tenant_id, kind)
                assert (counters.spent, counters.reserved) == (charged, 50_000)
                tickets[0].settle("aborted", TokenUsage(1, 1))
                charged += tickets[0].charged_nano_usd
        finally:
            done.set()
            await draining
        await gate._settlements.drained()
        assert (await totals(gate, tenant_id, kind)).spent == charged
        await drainer.drain_once()
        assert await ledger.charged(tenant_id, *EVER) == charged
    await drainer.close()
    await engine.dispose()
