from __future__ import annotations

import asyncio

import pytest

from gateway.admission import keys
from gateway.admission.errors import Refused
from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.billing.usage import TokenUsage
from gateway.redis_url import client as redis_client
from gateway.tenants.principal import LONGEST_REQUEST_S
from tests.gateway.admission.support import (
    LEASE_S,
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


@on_both
async def test_a_dead_gateway_leaves_one_abandoned_row_as_last_checkpointed(
    redis_url: str, gate: Admission, ledger: Ledger
) -> None:
    principal = tenant(slots=1, budget=10**9)
    async with admission(redis_url, ledger) as dying:
        ticket = await take(dying, principal, 50_000)
        ticket.checkpoint(TokenUsage(10, 5), "w1")
        await dying._leases.renew()
        ticket.checkpoint(TokenUsage(10, 6), "w1")  # never written
    with pytest.raises(Refused):
        await take(gate, principal)
    assert await gate.expire_leases() == 0
    advance(9.6, gate)
    assert await gate.expire_leases() == 1
    assert await gate.expire_leases() == 0
    [row] = ledger.events(principal)
    assert (row.request_id, row.admitted_at, row.status) == (ticket.request_id, ticket.admitted_at, "abandoned")
    assert (row.prompt_tokens, row.completion_tokens, row.charged_nano_usd, row.backend) == (10, 5, 20_000, "w1")
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved, counters.live) == (20_000, 0, 0)
    await take(gate, principal)


async def test_a_gateway_that_dies_before_its_first_heartbeat(redis_url: str, gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    async with admission(redis_url, ledger) as dying:
        ticket = await take(dying, principal, 50_000)
    advance(10, gate)
    assert await gate.expire_leases() == 1
    [row] = ledger.events(principal)
    assert (row.admitted_at, row.status, row.charged_nano_usd) == (ticket.admitted_at, "abandoned", 0)
    assert (row.key_id, row.route, row.price_id, row.attempts) == ("key1", "tiny", ticket.draft.tariff.price_id, 0)  # type: ignore[union-attr]


async def test_a_slot_is_held_over_a_silence_of_redis(gate: Admission) -> None:
    """No lease could be renewed, but the request runs on: only the janitor, who lets gateways renew first, frees it."""
    principal = tenant(None, 1, None, limit("concurrent", 1, subject="key", target="key1"))
    await take(gate, principal)
    advance(LEASE_S + 1, gate)
    with pytest.raises(Refused):
        await take(gate, principal)
    await gate._leases.renew()
    assert await gate.expire_leases() == 0
    with pytest.raises(Refused):
        await take(gate, principal)


async def test_a_heartbeat_keeps_leases(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(slots=1)
    ticket = await take(gate, principal)
    for _ in range(5):
        advance(5, gate)
        await gate._leases.renew()
        assert await gate.expire_leases() == 0
    with pytest.raises(Refused):
        await take(gate, principal)
    ticket.settle("ok")
    await ticket.settled()
    await gate._leases.renew()
    assert [row.status for row in ledger.events(principal)] == ["ok"]
    assert (await totals(gate, principal.tenant_id)).live == 0


async def test_heartbeats_and_sweeps_run_by_themselves(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(slots=2)
    async with admission(redis_url, ledger, lease_s=1.5, renewal_s=0.2) as gate:
        kept = await take(gate, principal)
        kept.checkpoint(TokenUsage(1, 2), "w1")
        lost = await take(gate, principal)
        gate._leases.remove(lost.request_id)

        async def swept() -> bool:
            return [row.request_id for row in ledger.events(principal)] == [lost.request_id]

        await eventually(swept)
        await asyncio.sleep(1)
        assert (await totals(gate, principal.tenant_id)).live == 1
        with redis_client(redis_url) as client:
            event = client.hget(keys.request(principal.shard, kept.request_id), "event")
        assert b'"completion_tokens":2' in event


@on_both
async def test_a_settlement_after_the_janitors_is_revision_two_with_the_difference(
    gate: Admission, ledger: Ledger
) -> None:
    principal = tenant(slots=1, budget=10**9)
    ticket = await take(gate, principal, 50_000)
    ticket.checkpoint(TokenUsage(10, 5), "w1")
    await gate._leases.renew()
    advance(10, gate)
    assert await gate.expire_leases() == 1
    ticket.settle("ok", TokenUsage(10, 20))
    await ticket.settled()
    entries = [
        (revision, event.status, event.charged_nano_usd) for _, revision, event in ledger.entries(principal.shard)
    ]
    assert entries == [(1, "abandoned", 20_000), (2, "ok", 50_000)]
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved, counters.live) == (50_000, 0, 0)
    gate._settlements.resend()
    await gate._settlements.drained()
    assert len(ledger.entries(principal.shard)) == 2
    assert (await totals(gate, principal.tenant_id)).spent == 50_000


async def test_a_late_settlement_may_cost_less(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(rpm=5, budget=10**9)
    ticket = await take(gate, principal, 50_000)
    ticket.checkpoint(TokenUsage(10, 5), "w1")
    await gate._leases.renew()
    advance(10, gate)
    await gate.expire_leases()
    ticket.settle("failed", TokenUsage(10, 0), attempts=0)
    await ticket.settled()
    counters = await totals(gate, principal.tenant_id)
    assert (counters.spent, counters.reserved, counters.window) == (0, 0, 0)


async def test_a_gateway_that_slept_past_its_lease_holds_a_slot_again(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(slots=1)
    ticket = await take(gate, principal)
    advance(10, gate)
    assert await gate.expire_leases() == 1
    await gate._leases.renew()
    assert (await totals(gate, principal.tenant_id)).live == 1
    with pytest.raises(Refused):
        await take(gate, principal)
    ticket.settle("ok")
    await ticket.settled()
    assert (await totals(gate, principal.tenant_id)).live == 0
    advance(10, gate)
    assert await gate.expire_leases() == 0
    assert [revision for _, revision, _ in ledger.entries(principal.shard)] == [1, 2]


async def test_a_heartbeat_that_crosses_a_settlement_takes_no_slot(gate: Admission) -> None:
    principal = tenant(slots=1)
    ticket = await take(gate, principal)
    ticket.settle("ok")
    await ticket.settled()
    gate._leases.add(ticket)  # as in the batch of a heartbeat that was put together before the settlement
    await gate._leases.renew()
    assert (await totals(gate, principal.tenant_id)).live == 0
    await take(gate, principal)


async def test_it_dies_after_all(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(slots=1)
    await take(gate, principal)
    advance(10, gate)
    await gate.expire_leases()
    await gate._leases.renew()
    advance(10, gate)
    assert await gate.expire_leases() == 0  # settled before; only the slot was held again
    assert (await totals(gate, principal.tenant_id)).live == 0
    assert len(ledger.entries(principal.shard)) == 1


async def test_more_leases_than_fit_in_one_call(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    await asyncio.gather(*(take(gate, principal, 10) for _ in range(250)))
    advance(5, gate)
    await gate._leases.renew()
    advance(5, gate)
    assert await gate.expire_leases() == 0
    advance(5, gate)
    assert await gate.expire_leases() == 250
    assert len(ledger.events(principal)) == 250
    counters = await totals(gate, principal.tenant_id)
    assert (counters.reserved, counters.live) == (0, 0)


@on_both
async def test_all_shards_are_swept(gate: Admission, ledger: Ledger) -> None:
    principals = [tenant() for _ in range(100)]
    await asyncio.gather(*(take(gate, principal) for principal in principals))
    advance(10, gate)
    assert await gate.expire_leases() == 100


async def test_a_request_that_nobody_settles_is_not_kept_for_ever(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(slots=1)
    async with admission(redis_url, ledger, longest_s=0.2) as gate:
        await take(gate, principal)
        await asyncio.sleep(0.35)
        advance(5, gate)
        await gate._leases.renew()
        advance(5, gate)
        assert await gate.expire_leases() == 1


async def test_the_longest_request_is_settled_once_even_after_the_janitor(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(slots=1, budget=10**9)
    async with admission(redis_url, ledger, longest_s=60) as gate:
        ticket = await take(gate, principal, 50_000)
        ticket.checkpoint(TokenUsage(10, 5), "w1")
        await gate._leases.renew()
        advance(10, gate)
        assert await gate.expire_leases() == 1
        ledger.drain(principal.shard)
        ticket._begun -= 75  # its time is over, and it ends a little late
        await gate._leases.renew()
        assert (await totals(gate, principal.tenant_id)).live == 1
        ticket.settle("ok", TokenUsage(10, 20))
        await ticket.settled()
        assert [row.charged_nano_usd for row in ledger.events(principal)] == [50_000]
        assert (await totals(gate, principal.tenant_id)).spent == 50_000


async def test_tombstones_outlive_the_longest_request(gate: Admission, redis_url: str) -> None:
    principal = tenant()
    ticket = await take(gate, principal)
    ticket.settle("ok")
    await ticket.settled()
    with redis_client(redis_url) as client:
        life_s = client.pttl(keys.request(principal.shard, ticket.request_id)) / 1000
    assert life_s > 1.5 * LONGEST_REQUEST_S


# Redis emptied


@on_both
async def test_an_emptied_redis_gets_everything_back_before_it_admits(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(slots=3, budget=200_000)
    async with (
        admission(redis_url, ledger, renewal_s=0.2, timeout_s=1) as one,
        admission(redis_url, ledger, renewal_s=0.2, timeout_s=1) as two,
    ):
        drained = await take(one, principal, 50_000)
        drained.settle("ok", TokenUsage(10, 5))
        await drained.settled()
        ledger.drain(principal.shard)
        mine = await take(one, principal, 10_000)
        mine.settle("ok", TokenUsage(5, 0))
        await mine.settled()
        undrained = await take(two, principal, 50_000)
        undrained.settle("ok", TokenUsage(20, 5))
        await undrained.settled()
        ones, twos = await take(one, principal, 40_000), await take(two, principal, 30_000)
        twos.checkpoint(TokenUsage(10, 5), "w1")
        with redis_client(redis_url) as client:
            client.flushall()
        with pytest.raises(RedisUnavailable) as caught:
            await take(one, principal, 1)
        assert 0 < caught.value.retry_after_s <= 1.2

        async def opened() -> bool:
            try:
                ticket = await take(one, principal, 1)
            except RedisUnavailable:
                return False
            ticket.settle("ok", TokenUsage(0, 0))
            await ticket.settled()
            return True

        await eventually(opened)
        counters = await totals(one, principal.tenant_id)
        assert (counters.spent, counters.reserved, counters.live) == (55_000, 70_000, 2)
        with pytest.raises(Refused):
            await take(two, principal, 75_001)
        ones.settle("ok", TokenUsage(10, 0))
        twos.settle("ok", TokenUsage(10, 5))
        await asyncio.gather(ones.settled(), twos.settled())
        counters = await totals(one, principal.tenant_id)
        assert (counters.spent, counters.reserved, counters.live) == (85_000, 0, 0)
    rows = ledger.events(principal)
    assert sorted(row.charged_nano_usd for row in rows) == [0, 5_000, 10_000, 20_000, 20_000, 30_000]
    assert sum(row.charged_nano_usd for row in rows) == 85_000


@on_both
async def test_a_redis_that_restarted_without_its_last_second(redis_url: str, ledger: Ledger) -> None:
    principal = tenant(slots=1, budget=10**9)
    async with admission(redis_url, ledger) as gate:
        with redis_client(redis_url) as client:
            ticket = await take(gate, principal, 50_000)
            before = {key: client.dump(key) for key in client.scan_iter()}
            ticket.settle("ok", TokenUsage(10, 5))
            await ticket.settled()
            client.flushall()
            for key, value in before.items():
                client.restore(key, 0, value)
            client.client_kill_filter(_type="normal", skipme=True)

        async def settled_again() -> bool:
            try:
                counters = await totals(gate, principal.tenant_id)
            except RedisUnavailable:
                return False
            return (counters.spent, counters.reserved, counters.live) == (20_000, 0, 0)

        await eventually(settled_again)
    assert [row.charged_nano_usd for row in ledger.events(principal)] == [20_000]


async def test_settled_while_redis_was_empty(gate: Admission, ledger: Ledger, redis_url: str) -> None:
    principal = tenant(budget=10**9)
    ticket = await take(gate, principal, 50_000)
    with redis_client(redis_url) as client:
        client.flushall()
    ticket.settle("ok", TokenUsage(10, 5))
    await ticket.settled()
    await gate._leases.renew()  # notices the missing epoch and sends the settlement again: still one row
    await gate._settlements.drained()
    assert [row.charged_nano_usd for row in ledger.events(principal)] == [20_000]
    advance(3700, gate)
    await take(gate, principal, 1)
    assert (await totals(gate, principal.tenant_id)).spent == 20_000


async def test_an_emptied_redis_that_a_new_gateway_takes_for_unused(
    redis_url: str, gate: Admission, ledger: Ledger
) -> None:
    """It admits at once; what the old gateway then brings back is counted once, however far it had come."""
    principal = tenant(budget=10**9)
    drained, undrained, running = [await take(gate, principal, 100_000) for _ in range(3)]
    for ticket in (drained, undrained):
        ticket.settle("ok", TokenUsage(10, 5))
        await ticket.settled()
        if ticket is drained:
            ledger.drain(principal.shard)
    with redis_client(redis_url) as client:
        client.flushall()
    async with admission(redis_url, ledger) as new:
        first = await take(new, principal, 1_000)
        assert (await totals(new, principal.tenant_id)).spent == 20_000
        await gate._leases.renew()
        await gate._settlements.drained()
        await gate._leases.renew()
        second = await take(new, principal, 1_000)
        counters = await totals(new, principal.tenant_id)
        assert (counters.spent, counters.reserved, counters.live) == (40_000, 102_000, 3)
        for ticket in (first, second, running):
            ticket.settle("ok", TokenUsage(1, 0))
            await ticket.settled()
        counters = await totals(new, principal.tenant_id)
        assert (counters.spent, counters.reserved) == (43_000, 0)
    assert sum(row.charged_nano_usd for row in ledger.events(principal)) == 43_000


async def test_a_running_request_put_back_reserves_again(redis_url: str, gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=60_000)
    await take(gate, principal, 50_000)
    with redis_client(redis_url) as client:
        client.flushall()
    async with admission(redis_url, ledger) as new:
        await take(new, principal, 1_000)
        await gate._leases.renew()
        assert (await totals(new, principal.tenant_id)).reserved == 51_000
        with pytest.raises(Refused):
            await take(new, principal, 9_001)


async def test_a_running_request_put_back_is_counted_by_limits_that_came_after_it(
    redis_url: str, gate: Admission, ledger: Ledger
) -> None:
    free = tenant()
    running = await take(gate, free, 50_000, tokens=70)
    with redis_client(redis_url) as client:
        client.flushall()
    limited = tenant(None, None, 60_000, limit("tokens", 100, "day"), tenant_id=free.tenant_id, generation=2)
    async with admission(redis_url, ledger) as new:
        await take(new, limited, 1_000, tokens=1)
        await gate._leases.renew()
        assert (await totals(new, free.tenant_id)).reserved == 51_000
        with pytest.raises(Refused):
            await take(new, limited, 0, tokens=30)
        running.settle("ok", TokenUsage(1, 0))
        await running.settled()
        assert (await totals(new, free.tenant_id))[:2] == (1_000, 1_000)
        await take(new, limited, 58_000, tokens=98)


async def test_what_ends_after_redis_was_emptied_is_counted_by_windows_built_meanwhile(
    redis_url: str, gate: Admission
) -> None:
    principal = tenant(2, None, None, limit("tokens", 100, "day"))
    ticket = await take(gate, principal, tokens=70)
    gate._leases.remove(ticket.request_id)  # as if its gateway were asleep
    with redis_client(redis_url) as client:
        client.flushall()
    await gate._leases.renew()
    await take(gate, principal, tokens=20)
    ticket.settle("ok", TokenUsage(30, 10))
    await ticket.settled()
    with pytest.raises(Refused) as refused:
        await take(gate, principal, tokens=41)
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "40"
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_new_redis_admits_at_once(redis_url: str, ledger: Ledger) -> None:
    async with admission(redis_url, ledger) as gate:
        await take(gate, tenant(1, 1, 1), 1)


@on_both
async def test_one_missing_shard_is_not_taken_for_a_new_redis(redis_url: str, ledger: Ledger) -> None:
    principal = tenant()
    async with admission(redis_url, ledger):
        with redis_client(redis_url) as client:
            client.delete(keys.epoch(principal.shard))
    async with admission(redis_url, ledger, renewal_s=0.2) as gate:
        with pytest.raises(RedisUnavailable):
            await take(gate, principal)
