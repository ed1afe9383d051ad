"""Redis dies or hangs with a gateway's settlements on their way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.admission.redis import RedisUnavailable
from gateway.admission.redis_cluster import slot_of
from gateway.admission.spool_file import orphans
from gateway.billing.usage import TokenUsage
from gateway.local.services import EmbeddedRedis
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import Ledger, admission, advance, eventually, take, tenant, totals
from tests.redis_cluster import ClusterNode, RedisCluster

ROOT = Path(__file__).parents[3]


@pytest.fixture
def own_redis(services_dir: Path) -> Iterator[EmbeddedRedis]:
    service = EmbeddedRedis(services_dir / "redis")
    service.start()
    yield service
    if service.running():
        hang(service, False)
    service.stop()


def hang(service: EmbeddedRedis, hung: bool = True) -> None:
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP if hung else signal.SIGCONT)


async def test_a_gateway_killed_while_redis_is_away_loses_no_settlement(
    own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    principal, ledger, folder = tenant(budget=10**9), Ledger(own_redis.url), tmp_path / "spool"
    command = [sys.executable, "-m", "tests.gateway.admission.spooler"]
    command += [own_redis.url, str(folder), str(principal.tenant_id), "20"]
    dying = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert dying.stdout is not None
    assert dying.stdin is not None
    assert await dying.stdout.readline() == b"admitted\n"
    own_redis.kill()
    dying.stdin.write(b"\n")
    assert await dying.stdout.readline() == b"settled\n"
    dying.kill()
    await dying.communicate()
    own_redis.start()

    async with admission(own_redis.url, ledger, spool_dir=folder) as successor:

        async def replayed() -> bool:
            return not orphans(folder)

        await eventually(replayed)
        counters = await totals(successor, principal.tenant_id)
        assert (counters.spent, counters.reserved, counters.live) == (400_000, 0, 0)
        assert await successor.expire_leases() == 0
    rows = ledger.events(principal)
    assert [(row.status, row.charged_nano_usd) for row in rows] == [("ok", 20_000)] * 20


@pytest.mark.parametrize("forgotten", [False, True])
async def test_what_the_janitor_anticipated_is_corrected_from_the_spool(
    own_redis: EmbeddedRedis, tmp_path: Path, forgotten: bool
) -> None:
    principal, ledger = tenant(budget=10**9), Ledger(own_redis.url)
    async with admission(own_redis.url, ledger, lease_s=0.3) as janitor:
        async with admission(own_redis.url, ledger, lease_s=0.3, timeout_s=0.5, spool_dir=tmp_path) as dying:
            ticket = await take(dying, principal, 50_000)
            own_redis.kill()
            ticket.settle("ok", TokenUsage(10, 5))
            await ticket.settled()
        own_redis.start()

        async def swept() -> bool:
            try:
                return await janitor.expire_leases() == 1
            except RedisUnavailable:
                return False

        await eventually(swept)
        [row] = ledger.events(principal)
        assert (row.status, row.charged_nano_usd) == ("abandoned", 0)
        if forgotten:
            await janitor._redis.command("FLUSHALL")
        async with admission(own_redis.url, ledger, spool_dir=tmp_path) as successor:
            await eventually(lambda: asyncio.sleep(0, not orphans(tmp_path)))
            await take(successor, principal, 1)
            assert (await totals(successor, principal.tenant_id)).spent == 20_000
    [row] = ledger.events(principal)
    assert (row.status, row.charged_nano_usd) == ("ok", 20_000)


async def test_what_landed_before_is_replayed_for_nothing_even_without_its_tombstone(
    own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    """Redis had taken it, its answer was lost, and by the time of the replay nothing there remembers."""
    principal, ledger = tenant(budget=10**9), Ledger(own_redis.url)
    async with admission(own_redis.url, ledger, timeout_s=0.5, spool_dir=tmp_path) as dying:
        ticket = await take(dying, principal, 50_000)
        hang(own_redis)
        ticket.settle("ok", TokenUsage(10, 5))
        await ticket.settled()
        assert len(orphans(tmp_path)) == 1
    hang(own_redis, False)
    async with admission(own_redis.url, ledger) as other:

        async def landed() -> bool:
            return (await totals(other, principal.tenant_id)).spent == 20_000

        await eventually(landed)
        assert len(ledger.events(principal)) == 1
        await other._redis.command("FLUSHALL")
    async with admission(own_redis.url, ledger, spool_dir=tmp_path) as successor:
        await eventually(lambda: asyncio.sleep(0, not orphans(tmp_path)))
        ticket = await take(successor, principal, 1)
        assert (await totals(successor, principal.tenant_id)).spent == 20_000
    assert [row.charged_nano_usd for row in ledger.events(principal)] == [20_000]


async def test_an_answer_waits_for_the_spool_where_redis_is_away_or_hangs_for_longer(
    own_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    principal, ledger = tenant(budget=10**9), Ledger(own_redis.url)
    async with admission(own_redis.url, ledger, timeout_s=1.0, spool_dir=tmp_path) as gate:
        early, late, last = [await take(gate, principal, 50_000) for _ in range(3)]
        hang(own_redis)
        early.settle("ok", TokenUsage(10, 5))
        await early.sent()
        assert (gate.waiting_settlements, orphans(tmp_path)) == (1, [])  # on its way, which is all that can be known
        await asyncio.sleep(0.2)
        late.settle("ok", TokenUsage(10, 5))
        await late.sent()
        assert len(orphans(tmp_path)) == 1
        hang(own_redis, False)
        await eventually(lambda: asyncio.sleep(0, gate.waiting_settlements == 0))
        own_redis.kill()
        await eventually(lambda: asyncio.sleep(0, not gate._redis.connected))
        last.settle("ok", TokenUsage(10, 5))
        await last.sent()
        assert len(orphans(tmp_path)) == 1


@pytest.mark.parametrize("loss", ["hung", "killed"])
async def test_every_call_is_answered_and_all_is_well_when_redis_is_back(
    own_redis: EmbeddedRedis, tmp_path: Path, loss: str
) -> None:
    ledger = Ledger(own_redis.url)
    closed, open_ = tenant(slots=3, budget=10**9), tenant(slots=3, budget=10**9, redis_loss="fail_open")
    async with admission(own_redis.url, ledger, timeout_s=0.3, renewal_s=0.2, spool_dir=tmp_path) as gate:
        running = [await take(gate, principal, 50_000) for principal in (closed, open_)]
        if loss == "hung":
            hang(own_redis)
        else:
            own_redis.kill()
        async with asyncio.timeout(30):
            for _ in range(3):  # on the connection that stood, and on new ones
                outcomes = await asyncio.gather(
                    *(take(gate, closed, 50_000) for _ in range(10)), return_exceptions=True
                )
                assert all(isinstance(outcome, RedisUnavailable) for outcome in outcomes)
            served = [await take(gate, open_, 50_000) for _ in range(2)]
            for ticket in (*running, *served):
                ticket.settle("ok", TokenUsage(10, 5))
            await asyncio.gather(*(ticket.settled() for ticket in (*running, *served)))
        assert gate._settlements.waiting >= 4
        assert gate._settlements.unsafe == 0
        if loss == "hung":
            hang(own_redis, False)
        else:
            own_redis.start()
        async with asyncio.timeout(30):
            await gate._settlements.drained()

        async def admits() -> bool:
            try:
                (await take(gate, closed, 1)).settle("failed", attempts=0)
                (await take(gate, open_, 1)).settle("failed", attempts=0)
            except RedisUnavailable:
                return False
            return True

        await eventually(admits)
        async with asyncio.timeout(30):
            await gate._settlements.drained()
        for principal, spent in ((closed, 20_000), (open_, 60_000)):
            counters = await totals(gate, principal.tenant_id)
            assert (counters.spent, counters.reserved, counters.live) == (spent, 0, 0)
            charged = [row.charged_nano_usd for row in ledger.events(principal) if row.status == "ok"]
            assert charged == [20_000] * (spent // 20_000)
    assert orphans(tmp_path) == []


@pytest.fixture
def own_cluster(services_dir: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(services_dir / "cluster", durable=True)
    cluster.start()
    yield cluster
    cluster.stop()


async def test_a_dead_node_of_a_cluster_concerns_its_own_tenants_alone(
    own_cluster: RedisCluster, tmp_path: Path
) -> None:
    dead, well, _ = own_cluster.nodes
    ledger = Ledger(own_cluster.url)

    def tenant_at(node: ClusterNode) -> Principal:
        while own_cluster.owner(slot_of((principal := tenant(slots=3, budget=10**9)).shard)) is not node:
            pass
        return principal

    theirs, ours, left = tenant_at(dead), tenant_at(well), tenant_at(well)
    async with admission(own_cluster.url, ledger, timeout_s=0.5, lease_s=2.0, spool_dir=tmp_path) as gate:
        running, ended, running_well = [await take(gate, each, 50_000) for each in (theirs, theirs, ours)]
        async with admission(own_cluster.url, ledger, lease_s=0.2) as dying:
            await take(dying, left, 50_000)
        dead.kill()
        for _ in range(2):
            with pytest.raises(RedisUnavailable):
                await take(gate, theirs)
            settled = await take(gate, ours, 50_000)
            settled.settle("ok", TokenUsage(10, 5))
            await settled.settled()
        ended.settle("ok", TokenUsage(10, 5))
        await ended.settled()
        with pytest.raises(RedisUnavailable):  # and yet the others' leases are renewed, and those of the dead swept
            await gate._leases.renew()
        advance(1.5, gate)
        with pytest.raises(RedisUnavailable):
            await gate._leases.renew()
        with pytest.raises(RedisUnavailable):
            await gate.expire_leases()
        advance(1.0, gate)
        assert (await totals(gate, ours.tenant_id))[:3] == (40_000, 50_000, 1)
        assert [row.status for row in ledger.events(left)] == ["abandoned"]
        async with admission(own_cluster.url, ledger, timeout_s=0.5) as late:  # it started while a node was away
            await take(late, ours)
        dead.start()
        async with asyncio.timeout(30):
            await gate._settlements.drained()

        async def admits() -> bool:
            try:
                (await take(gate, theirs, 1)).settle("failed", attempts=0)
            except RedisUnavailable:
                return False
            return True

        await eventually(admits)
        for ticket in (running, running_well):
            ticket.settle("ok", TokenUsage(10, 5))
        async with asyncio.timeout(30):
            await gate._settlements.drained()
        assert (await totals(gate, theirs.tenant_id))[:3] == (40_000, 0, 0)
        assert (await totals(gate, ours.tenant_id))[:2] == (60_000, 0)
    assert orphans(tmp_path) == []
