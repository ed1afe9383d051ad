from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission import keys
from gateway.admission.errors import Refused, Stale
from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.ids import uuid7
from gateway.local.services import EmbeddedRedis
from gateway.redis_url import client as redis_client
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import (
    DRAFT,
    NOTHING,
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

ROOT = Path(__file__).parents[3]


async def refusal(gate: Admission, principal: Principal, bound: int = 0) -> Refused:
    with pytest.raises(Refused) as caught:
        await take(gate, principal, bound)
    return caught.value


def refusals(redis_url: str, principal: Principal) -> dict[str, int]:
    with redis_client(redis_url) as client:
        found = client.hgetall(keys.refusals(principal.shard))
    return {
        field.decode(): int(count)
        for field, count in found.items()
        if field.startswith(str(principal.tenant_id).encode())
    }


# Requests per minute


async def test_requests_per_minute_with_headers_and_a_true_retry_after(gate: Admission) -> None:
    principal = tenant(rpm=2)
    first = await take(gate, principal)
    assert first.headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "0s",
    }
    advance(20, gate)
    second = await take(gate, principal)
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.headers["x-ratelimit-reset-requests"] != "0s"
    refused = await refusal(gate, principal)
    assert (refused.reason, refused.limit, refused.remaining) == ("requests", 2, 0)
    assert refused.retry_after_s is not None
    assert 35 < refused.retry_after_s <= 41
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    advance(refused.retry_after_s - 5, gate)
    again = await refusal(gate, principal)
    assert again.retry_after_s is not None
    assert again.retry_after_s <= 5
    advance(again.retry_after_s, gate)
    await take(gate, principal)  # the first has left the window, the second has not
    await refusal(gate, principal)


@on_both
async def test_refusals_use_nothing_up(gate: Admission, redis_url: str) -> None:
    principal = tenant(rpm=2, slots=1, budget=100)
    held = await take(gate, principal, 60)
    before = await totals(gate, principal.tenant_id)
    for _ in range(5):
        assert (await refusal(gate, principal, 10)).reason == "concurrent"
        assert (await refusal(gate, principal, 41)).reason == "budget"
    assert await totals(gate, principal.tenant_id) == before
    held.settle("ok", TokenUsage(0, 0))
    await held.settled()
    await take(gate, principal, 100)
    assert (await refusal(gate, principal)).reason == "requests"
    counted = refusals(redis_url, principal)
    reasons = {(field.split("|")[1], field.split("|")[2]): count for field, count in counted.items()}
    assert reasons[("key1", "concurrent")] == 5
    assert reasons[("key1", "budget")] == 5
    assert reasons[("key1", "requests")] == 1
    assert all(int(field.split("|")[3]) % 900 == 0 for field in counted)


async def test_the_longest_wait_of_several_limits_counts(gate: Admission) -> None:
    principal = tenant(rpm=1, slots=1)
    await take(gate, principal)
    refused = await refusal(gate, principal)
    assert refused.reason == "requests"
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 55


@pytest.mark.parametrize("limited", [tenant(rpm=0), tenant(slots=0)])
async def test_a_limit_of_zero_lets_nothing_pass_ever(gate: Admission, limited: Principal) -> None:
    assert (await refusal(gate, limited)).retry_after_s is None


async def test_a_request_that_reached_no_backend_is_given_back(gate: Admission) -> None:
    principal = tenant(rpm=1)
    for _ in range(3):
        ticket = await take(gate, principal)
        ticket.settle("failed", attempts=0, error_code="no_backend_available")
        await ticket.settled()
    ticket = await take(gate, principal)
    ticket.settle("failed", attempts=1)
    await ticket.settled()
    assert (await refusal(gate, principal)).reason == "requests"


async def test_a_refund_goes_to_the_second_that_was_charged(gate: Admission) -> None:
    principal = tenant(rpm=2)
    old = await take(gate, principal)
    advance(30, gate)
    new = await take(gate, principal)
    new.settle("failed", attempts=0)
    await new.settled()
    assert (await totals(gate, principal.tenant_id)).window == 1
    advance(31.5, gate)  # the old one has left by itself
    assert (await totals(gate, principal.tenant_id)).window == 0
    await take(gate, principal)
    await take(gate, principal)
    await refusal(gate, principal)
    old.settle("failed", attempts=0)  # its second is gone: nothing to give back
    await old.settled()
    assert (await totals(gate, principal.tenant_id)).window == 2
    await refusal(gate, principal)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(1, 4), st.lists(st.integers(0, 40_000), min_size=1, max_size=25))
def test_no_minute_ever_holds_more_than_the_limit(redis_server: str, rpm: int, gaps_ms: list[int]) -> None:
    async def scenario() -> None:
        async with admission(redis_server, Ledger(redis_server)) as gate:
            principal = tenant(rpm=rpm)
            admitted: list[float] = []
            for gap in gaps_ms:
                advance(gap / 1000, gate)
                try:
                    ticket = await take(gate, principal)
                except Refused as refused:
                    assert refused.retry_after_s is not None
                    assert 0 < refused.retry_after_s <= 61
                    advance(refused.retry_after_s, gate)
                    ticket = await take(gate, principal)
                admitted.append(ticket.admitted_at.timestamp())
            for index in range(len(admitted) - rpm):
                assert admitted[index + rpm] - admitted[index] > 60

    asyncio.run(scenario())


@pytest.mark.parametrize("back_s", [70, 86_400])
async def test_a_clock_set_back_admits_no_more_and_breaks_nothing(gate: Admission, back_s: float) -> None:
    principal = tenant(rpm=2)
    advance(200, gate)
    await take(gate, principal)
    await take(gate, principal)
    advance(-back_s, gate)
    refused = await refusal(gate, principal)
    assert refused.retry_after_s is not None
    advance(back_s + 62, gate)
    await take(gate, principal)


# Concurrent requests


@on_both
async def test_slots_come_back_at_settlement(gate: Admission) -> None:
    principal = tenant(slots=2)
    first, second = await take(gate, principal), await take(gate, principal)
    refused = await refusal(gate, principal)
    assert (refused.reason, refused.limit, refused.remaining, refused.headers) == ("concurrent", 2, 0, {})
    first.settle("aborted")
    await first.settled()
    await take(gate, principal)
    await refusal(gate, principal)
    second.settle("ok")


async def test_who_was_answered_finds_its_slot_free_at_any_gateway(redis_url: str, ledger: Ledger) -> None:
    principals = tenant(slots=1), tenant(budget=1_500), tenant(None, None, None, limit("tokens", 150))
    async with admission(redis_url, ledger) as one, admission(redis_url, ledger) as other:
        for principal in principals:
            for _ in range(100):
                for gate in (one, other):
                    ticket = await take(gate, principal, 1_000, tokens=100)
                    ticket.settle("ok", TokenUsage())
                    await ticket.sent()


async def test_an_answer_is_not_held_up_where_there_is_room_for_another(gate: Admission) -> None:
    roomy = tenant(None, 2, 2_000, limit("tokens", 200))
    for _ in range(3):
        ticket = await take(gate, roomy, 1_000, tokens=100)
        ticket.settle("ok", TokenUsage())
        await ticket.sent()
        assert gate.waiting_settlements == 1
        await ticket.settled()


async def test_a_slot_whose_lease_ran_out_is_free_once_the_janitor_came_by(gate: Admission) -> None:
    principal = tenant(slots=1)
    await take(gate, principal)
    advance(10, gate)
    await refusal(gate, principal)
    assert await gate.expire_leases() == 1
    await take(gate, principal)


# Budgets


@on_both
async def test_the_worst_case_is_reserved_and_the_difference_returned(gate: Admission) -> None:
    principal = tenant(budget=100_000)
    first = await take(gate, principal, 60_000)
    refused = await refusal(gate, principal, 40_001)
    assert (refused.reason, refused.limit, refused.remaining, refused.retry_after_s) == ("budget", 100_000, 40_000, 1.0)
    second = await take(gate, principal, 40_000)
    first.settle("ok", TokenUsage(10, 5))
    await first.settled()
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved) == (20_000, 40_000)
    await take(gate, principal, 40_000)
    second.settle("ok", TokenUsage(100, 0))  # above its bound: charged nevertheless
    await second.settled()
    assert second.event is not None
    assert second.event.over_bound
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved) == (120_000, 40_000)


async def test_a_spent_budget_waits_for_the_next_period(gate: Admission) -> None:
    principal = tenant(budget=(100_000, "day"))
    ticket = await take(gate, principal, 100_000)
    ticket.settle("ok", TokenUsage(100, 0))
    await ticket.settled()
    refused = await refusal(gate, principal, 1)
    midnight = ticket.admitted_at.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    assert refused.retry_after_s is not None
    assert abs((midnight - ticket.admitted_at).total_seconds() - refused.retry_after_s) < 10
    await take(gate, principal, 0)  # what is free passes
    advance(refused.retry_after_s - 5, gate)
    again = await refusal(gate, principal, 1)
    assert again.retry_after_s is not None
    advance(again.retry_after_s, gate)
    await take(gate, principal, 100_000)


async def test_no_wait_helps_a_request_above_the_whole_budget(gate: Admission) -> None:
    assert (await refusal(gate, tenant(budget=10), 11)).retry_after_s is None
    principal = tenant(budget=(100_000, "total"))
    ticket = await take(gate, principal, 100_000)
    ticket.settle("ok", TokenUsage(100, 0))
    await ticket.settled()
    assert (await refusal(gate, principal, 1)).retry_after_s is None


async def test_a_budget_of_zero_admits_what_is_free(gate: Admission) -> None:
    principal = tenant(budget=0)
    await take(gate, principal, 0)
    await refusal(gate, principal, 1)


async def test_a_late_settlement_does_not_touch_the_next_period(gate: Admission) -> None:
    principal = tenant(budget=(100_000, "day"))
    yesterday = await take(gate, principal, 50_000)
    advance(86_400, gate)
    await take(gate, principal, 10_000)
    yesterday.settle("ok", TokenUsage(10, 5))
    await yesterday.settled()
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved) == (0, 10_000)


async def test_a_change_of_zone_begins_with_the_next_period(gate: Admission) -> None:
    tenant_id = uuid7()
    first = await take(gate, tenant(budget=(100, "day"), tenant_id=tenant_id), 60)
    moved = tenant(budget=(100, "day"), timezone="Pacific/Kiritimati", tenant_id=tenant_id, generation=2)
    second = await take(gate, moved, 40)
    await refusal(gate, moved, 1)
    assert second.admitted_at - first.admitted_at < timedelta(hours=1)
    advance(86_400, gate)
    await take(gate, moved, 100)


async def test_amounts_are_exact_up_to_the_largest(gate: Admission, redis_url: str) -> None:
    most = 2**53 - 1
    principal = tenant(budget=most)
    await take(gate, principal, most - 1)
    assert (await totals(gate, principal.tenant_id)).reserved == most - 1
    await refusal(gate, principal, 2)
    await take(gate, principal, 1)
    assert (await totals(gate, principal.tenant_id)).reserved == most
    with pytest.raises(ValueError, match="bound"):
        await take(gate, principal, most + 1)
    with pytest.raises(ValueError, match="bound"):
        await take(gate, principal, -1)


# All replicas


@pytest.mark.parametrize(
    ("principal", "bound", "passes"),
    [(tenant(rpm=10), 0, 10), (tenant(slots=7), 0, 7), (tenant(budget=1000), 90, 11), (tenant(5, 9, 1000), 90, 5)],
)
@on_both
async def test_replicas_share_every_limit(
    redis_url: str, ledger: Ledger, principal: Principal, bound: int, passes: int
) -> None:
    async with (
        admission(redis_url, ledger) as one,
        admission(redis_url, ledger) as two,
        admission(redis_url, ledger) as three,
    ):
        calls = [take(gate, principal, bound) for _ in range(10) for gate in (one, two, three)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == passes
        assert all(isinstance(outcome, Refused) for outcome in outcomes if isinstance(outcome, BaseException))


async def test_processes_share_every_limit(redis_url: str) -> None:
    """Tenants that Redis has never seen, and three processes that begin at the same moment."""
    limits = {(40, 0, 0): 40, (0, 25, 0): 25, (0, 0, 3300): 33}
    contests = [",".join(map(str, (uuid7(), *limit, 100, 50))) for limit in limits]
    command = [sys.executable, "-m", "tests.gateway.admission.contender", redis_url, *contests]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    counts = [[int(count) for count in output.split()] for output, _ in outputs]
    assert [sum(contest) for contest in zip(*counts, strict=True)] == list(limits.values())


# Time


class Behind(SystemClock):
    def now(self) -> datetime:
        return super().now() - timedelta(days=2)


async def test_the_time_of_redis_counts_whatever_this_hosts_clock_says(redis_url: str, ledger: Ledger) -> None:
    gate = Admission(redis_url, Behind(), lease_s=10, renewal_s=0.1, timeout_s=2, ledger=ledger)
    assert gate.now() < datetime.now(UTC) - timedelta(days=1)
    await gate.start()
    assert abs(gate.now() - datetime.now(UTC)) < timedelta(seconds=5)
    gate._redis.time_offset_ms = 3_600_000

    async def noticed() -> bool:
        return abs(gate.now() - datetime.now(UTC) - timedelta(hours=1)) < timedelta(seconds=5)

    await eventually(noticed)
    ticket = await take(gate, tenant(budget=100), 100)
    assert abs(ticket.admitted_at - gate.now()) < timedelta(seconds=5)
    ticket.settle("ok")
    await gate.close()


# Staleness


@on_both
async def test_an_announced_generation_makes_older_principals_stale(redis_url: str, ledger: Ledger) -> None:
    tenant_id = uuid7()
    async with admission(redis_url, ledger) as one, admission(redis_url, ledger) as two:
        old = tenant(tenant_id=tenant_id, generation=1)
        await take(one, old)
        await one.announce_generation(tenant_id, 3)
        await one.announce_generation(tenant_id, 2)  # late news
        for gate in (one, two):
            with pytest.raises(Stale):
                await take(gate, old)
            with pytest.raises(Stale):
                await take(gate, tenant(tenant_id=tenant_id, generation=2))
        request_id = uuid7()
        with pytest.raises(Stale):
            await one.admit(request_id, old, draft=DRAFT, bound=NOTHING)
        # The pipeline asks once more under the same id.
        await one.admit(request_id, tenant(tenant_id=tenant_id, generation=3), draft=DRAFT, bound=NOTHING)


async def test_postgres_set_back_by_a_restore_is_believed(redis_url: str, ledger: Ledger) -> None:
    tenant_id = uuid7()
    async with admission(redis_url, ledger) as one, admission(redis_url, ledger) as two:
        restored = tenant(tenant_id=tenant_id, generation=3)
        await one.announce_generation(tenant_id, 7)
        with pytest.raises(Stale) as caught:
            await take(one, restored)
        assert caught.value.generation == 7
        await one.announce_generation(tenant_id, 8)  # after Postgres was read: newer than that
        with pytest.raises(Stale) as again:
            await one.admit(uuid7(), restored, draft=DRAFT, bound=NOTHING, after=caught.value)
        await one.admit(uuid7(), restored, draft=DRAFT, bound=NOTHING, after=again.value)
        await take(two, restored)
        await two.announce_generation(tenant_id, 4)
        with pytest.raises(Stale):
            await take(one, restored)


async def test_a_newer_principal_is_news_itself(gate: Admission) -> None:
    tenant_id = uuid7()
    await take(gate, tenant(tenant_id=tenant_id, generation=5))
    with pytest.raises(Stale):
        await take(gate, tenant(tenant_id=tenant_id, generation=4))


async def test_a_request_id_is_admitted_once(gate: Admission) -> None:
    principal, request_id = tenant(), uuid7()
    ticket = await gate.admit(request_id, principal, draft=DRAFT, bound=NOTHING)
    with pytest.raises(RuntimeError, match="DUPLICATE"):
        await gate.admit(request_id, principal, draft=DRAFT, bound=NOTHING)
    ticket.settle("ok")
    await ticket.settled()
    with pytest.raises(RuntimeError, match="DUPLICATE"):
        await gate.admit(request_id, principal, draft=DRAFT, bound=NOTHING)


# Cancellation and trouble


@on_both
async def test_a_cancelled_admission_leaves_nothing(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(rpm=1, slots=1, budget=100)
    await take(gate, tenant())
    for turns in range(4):
        task = asyncio.ensure_future(take(gate, principal, 100))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await gate._settlements.drained()
    counters = await totals(gate, principal.tenant_id)
    assert (counters.live, counters.reserved or 0, counters.window) == (0, 0, 0)
    assert ledger.events(principal) == []
    await take(gate, principal, 100)


async def test_an_admission_that_arrives_after_its_withdrawal_is_kept_out(gate: Admission, ledger: Ledger) -> None:
    principal, request_id = tenant(slots=1, budget=100), uuid7()
    gate._withdraw(request_id, principal)
    await gate._settlements.drained()
    with pytest.raises(RuntimeError, match="DUPLICATE"):
        await gate.admit(request_id, principal, draft=DRAFT, bound=Bound(100, 0))
    await take(gate, principal, 100)
    assert ledger.events(principal) == []


async def test_a_hung_redis_refuses_in_time_and_loses_nothing(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir / "redis")
    url = service.start()
    assert service.process is not None
    ledger = Ledger(url)
    principal = tenant(rpm=5, slots=4, budget=10**9)
    try:
        async with admission(url, ledger, timeout_s=0.5, renewal_s=0.2, lease_s=30) as gate:
            running = await take(gate, principal, 50_000)
            os.kill(service.process.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                outcomes = await asyncio.gather(*(take(gate, principal, 1) for _ in range(3)), return_exceptions=True)
                assert all(isinstance(outcome, RedisUnavailable) for outcome in outcomes)
                assert time.monotonic() - began < 5
                running.settle("ok", TokenUsage(10, 5))
                await running.settled()  # tried, and left to be tried again
                assert gate._settlements.waiting > 0
                began = time.monotonic()
                with pytest.raises(RedisUnavailable):
                    await take(gate, principal, 1)
                assert time.monotonic() - began < 5
            finally:
                os.kill(service.process.pid, signal.SIGCONT)
            async with asyncio.timeout(10):
                await gate._settlements.drained()
            # Redis has by now also read the admissions that were given up; they have left nothing behind.
            counters = await totals(gate, principal.tenant_id)
            assert (counters.spent, counters.reserved, counters.live, counters.window) == (20_000, 0, 0, 1)
            assert [row.status for row in ledger.events(principal)] == ["ok"]
            await take(gate, principal, 1)
    finally:
        service.stop()


async def test_redis_killed_and_started_again(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir / "redis")
    url = service.start()
    ledger = Ledger(url)
    principal = tenant(slots=2, budget=10**9)
    try:
        async with admission(url, ledger, timeout_s=0.5, renewal_s=0.2, lease_s=30) as gate:
            running, ending = await take(gate, principal, 50_000), await take(gate, principal, 50_000)
            service.kill()
            ending.settle("ok", TokenUsage(10, 5))
            with pytest.raises(RedisUnavailable):
                await take(gate, principal, 1)
            for _ in range(5):  # never sent, so there is nothing to withdraw
                with pytest.raises(RedisUnavailable):
                    await take(gate, principal, 1)
            assert gate._settlements.waiting <= 2
            service.start()

            async def recovered() -> bool:
                return gate._settlements.waiting == 0

            await eventually(recovered)
            # The server syncs once a second, so it may have forgotten all of this; the gateway has not.
            counters = await eventually_counted(gate, principal)
            assert (counters.live, counters.reserved) == (1, 50_000) or counters.reserved is None
            running.settle("ok", TokenUsage(10, 5))
            await running.settled()
            assert [row.charged_nano_usd for row in ledger.events(principal)] == [20_000, 20_000]
    finally:
        service.stop()


async def eventually_counted(gate: Admission, principal: Principal):  # type: ignore[no-untyped-def]
    async def one_is_live() -> bool:
        return (await totals(gate, principal.tenant_id)).live == 1

    await eventually(one_is_live)
    return await totals(gate, principal.tenant_id)


async def test_a_gateway_may_start_before_redis(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir / "redis")
    url = service.start()
    service.stop()
    async with admission(url, Ledger(url), timeout_s=0.3, renewal_s=0.2) as gate:
        with pytest.raises(RedisUnavailable):
            await take(gate, tenant())
        service.start()
        try:

            async def admitted() -> bool:
                try:
                    await take(gate, tenant(rpm=1))
                except RedisUnavailable:
                    return False
                return True

            await eventually(admitted)
        finally:
            service.stop()


async def test_too_many_waiting_settlements_keep_new_requests_out(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir / "redis")
    url = service.start()
    try:
        async with admission(url, Ledger(url), timeout_s=0.3, renewal_s=0.2, lease_s=60, max_unsettled=2) as gate:
            principal = tenant()
            tickets = [await take(gate, principal) for _ in range(2)]
            service.stop()
            for ticket in tickets:
                ticket.settle("ok", TokenUsage(10, 5))
            with pytest.raises(RedisUnavailable, match="settlements wait"):
                await take(gate, principal)
            service.start()

            async def settled() -> bool:
                return gate._settlements.waiting == 0

            await eventually(settled)
            await take(gate, principal)
    finally:
        service.stop()
