from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.errors import Refused
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Ticket
from gateway.billing.drainer import Drainer
from gateway.billing.ledger_sums import PostgresSums
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.db.engine import transaction
from gateway.ids import uuid7
from gateway.routing.route import Route
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory, LimitSpec
from gateway.tenants.principal import Principal
from gateway.tenants.service import Tenants
from gateway.verify.difference import Difference
from gateway.verify.service import Verification, verify
from tests.gateway.admission.support import DRAFT, admission
from tests.gateway.db.support import opened
from tests.gateway.tenants.support import ACTOR

LIMITS = (
    LimitSpec(metric="budget", window="month", amount=10**15),
    LimitSpec(metric="budget", window="total", amount=10**15, subject="model", target="tiny"),
    LimitSpec(metric="budget", window="day", amount=10**15, subject="end_user"),
    LimitSpec(metric="requests", window="hour", amount=10**6),
    LimitSpec(metric="tokens", window="day", amount=10**9, subject="project", target="default"),
    LimitSpec(metric="concurrent", amount=1000, subject="model", target="tiny"),
)
DRAFTS = (DRAFT, replace(DRAFT, end_user="a" * 32), replace(DRAFT, end_user="b" * 32), replace(DRAFT, route="other"))
BOUND = Bound(1_000_000, 500)


@dataclass
class World:
    """One tenant with limits of every kind, an admission, a ledger and a drainer that runs when it is told to."""

    redis_url: str
    engine: AsyncEngine
    gate: Admission
    drainer: Drainer
    principal: Principal

    @property
    def tenant_id(self) -> UUID:
        return self.principal.tenant_id

    async def take(self, number: int = 0) -> Ticket:
        draft = DRAFTS[number % len(DRAFTS)]
        return await self.gate.admit(uuid7(), self.principal, draft=draft, bound=BOUND)

    async def serve(self, number: int) -> Ticket:
        ticket = await self.take(number)
        ticket.settle("ok", TokenUsage(100 + number, number), backend=f"w{number % 2}")
        await ticket.settled()
        return ticket

    async def verify(self, *, of_all: bool = True, pauses_s: tuple[float, ...] = (0.05, 0.05)) -> Verification:
        tenant = None if of_all else self.tenant_id
        return await verify(self.gate._redis, self.redis_url, self.engine, tenant_id=tenant, pauses_s=pauses_s)

    async def redis(self, *command: Any) -> Any:
        return await self.gate._redis.command(*command)

    async def sql(self, statement: str, **values: Any) -> None:
        async with transaction(self.engine) as connection:
            await connection.execute(text(statement), values)

    def counter(self, name: str) -> str:
        return f"{keys.of_tenant(self.tenant_id).tenant}:{name}"


@pytest.fixture
async def world(redis_url: str, database_url: str) -> AsyncIterator[World]:
    clock = SystemClock()
    async with (
        opened(database_url, pool_size=6) as engine,
        admission(redis_url, PostgresSums(engine)) as gate,
    ):
        catalog = Catalog(engine, clock)
        await catalog.create_pool(ACTOR, "pool")
        await catalog.create_route(ACTOR, Route("tiny", "pool", "tiny", 1000, 50, 500, 30.0))
        directory = Directory(engine, clock, announce=gate.announce_generation)
        await directory.create_tenant(ACTOR, "acme", limits=LIMITS)
        key, _ = await directory.create_key(ACTOR, "acme", "test")
        # As if they were a month old: a window is checked from its whole length on.
        async with transaction(engine) as connection:
            await connection.execute(text("UPDATE limits SET created_at = created_at - interval '30 days'"))
        principal = await Tenants(engine, clock).authenticate(key)
        drainer = Drainer(engine, redis_url, clock)
        made = World(redis_url, engine, gate, drainer, principal)
        yield made
        await drainer.close()


@pytest.fixture
async def busy_world(world: World) -> World:
    """Rows, events on their way, and open requests, of which one was settled by the janitor and runs on."""
    for number in range(12):
        await world.serve(number)
    await world.drainer.drain_once()
    for number in range(5):
        await world.serve(number)
    for number in range(4):
        await world.take(number)
    return world


def kinds(found: Verification) -> set[str]:
    return {each.kind for each in found.differences}


def only(found: Verification, kind: str, **where: str) -> Difference:
    [difference] = [
        each for each in found.differences if each.kind == kind and where.items() <= dict(each.where).items()
    ]
    return difference


async def test_all_agrees(busy_world: World) -> None:
    found = await busy_world.verify()
    assert found.differences == []
    assert found.busy == []
    # Five of the tenant and its model, project and slots, and a budget of each of two end users.
    assert (found.tenants, found.running, found.unchecked) == (1, 4, 0)
    assert found.counters == 8
    assert found.remembered >= 21


async def test_what_the_janitor_settled_and_still_runs(busy_world: World) -> None:
    gate = busy_world.gate
    late = await busy_world.take()
    late.checkpoint(TokenUsage(100, 7), "w1")
    await gate._heartbeat()
    gate._redis.time_offset_ms += 20_000
    await gate.expire_leases()
    await gate._heartbeat()
    assert late.resumed
    assert (await busy_world.verify()).differences == []
    await busy_world.drainer.drain_once()
    assert (await busy_world.verify()).differences == []
    late.settle("ok", TokenUsage(100, 30), backend="w1")
    await late.settled()
    assert (await busy_world.verify()).differences == []
    await busy_world.drainer.drain_once()
    assert (await busy_world.verify()).differences == []


async def test_no_false_alarm_under_load(world: World) -> None:
    stop = asyncio.Event()
    chance = random.Random(7)

    async def client(number: int) -> None:
        while not stop.is_set():
            with suppress(Refused):
                ticket = await world.take(chance.randrange(4))
                await asyncio.sleep(chance.random() / 50)
                ticket.settle(
                    chance.choice(["ok", "aborted", "failed"]),
                    TokenUsage(chance.randrange(100), chance.randrange(100)),
                    attempts=chance.randrange(2),
                )
            await asyncio.sleep(0)

    async def drain() -> None:
        while not stop.is_set():
            await world.drainer.drain_once()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for number in range(12):
            tasks.create_task(client(number))
        tasks.create_task(drain())
        for _ in range(8):
            found = await world.verify(pauses_s=(0.05,) * 6)
            assert found.differences == []
        # What is wrong is found at work, too.
        await world.redis("HINCRBY", world.counter("b:month:tenant:"), "spent", 1)
        assert only(await world.verify(pauses_s=(0.05,) * 6), "spent", subject="tenant").difference == 1
        await world.redis("HINCRBY", world.counter("b:month:tenant:"), "spent", -1)
        stop.set()
    found = await world.verify()
    assert (found.differences, found.busy, found.running) == ([], [], 0)


async def test_budgets_that_are_off(busy_world: World) -> None:
    await busy_world.redis("HINCRBY", busy_world.counter("b:month:tenant:"), "spent", 1)
    await busy_world.redis("HINCRBY", busy_world.counter("b:total:model:tiny"), "reserved", -3)
    await busy_world.redis("HINCRBY", busy_world.counter(f"b:day:each:{'a' * 32}"), "spent", -2)
    for of_all in (True, False):
        found = await busy_world.verify(of_all=of_all)
        assert len(found.differences) == 3
        assert only(found, "spent", subject="tenant", window="month").difference == 1
        assert only(found, "spent", subject="end_user", target="a" * 32).difference == -2
        reserved = only(found, "reserved", subject="model", target="tiny", window="total")
        assert (reserved.expected, reserved.found) == (3_000_000, 2_999_997)
        assert {each.tenant_id for each in found.differences} == {busy_world.tenant_id}


async def test_windows_that_are_off(busy_world: World) -> None:
    requests = busy_world.counter("r:hour:tenant:")
    tokens = busy_world.counter(f"t:day:project:{busy_world.principal.project_id}")
    for key, amount in ((requests, 1), (tokens, -40)):
        fields = await busy_world.redis("HKEYS", key)
        [bucket, *_] = [field for field in fields if field.isdigit()]
        await busy_world.redis("HINCRBY", key, bucket, amount)
    found = await busy_world.verify()
    assert kinds(found) == {"requests", "tokens"}
    assert only(found, "requests", subject="tenant", window="hour").difference == 1
    assert only(found, "tokens", subject="project", window="day").difference == -40


async def test_a_lost_row(busy_world: World) -> None:
    lost = await busy_world.serve(9)
    await busy_world.drainer.drain_once()
    await busy_world.sql("DELETE FROM usage_events WHERE request_id = :id", id=lost.request_id)
    found = await busy_world.verify()
    assert kinds(found) == {"row", "rollup", "spent", "requests", "tokens"}
    assert only(found, "row").where == (("request", str(lost.request_id)),)
    charged = only(found, "rollup", sum="charged_nano_usd")
    assert charged.difference == lost.charged_nano_usd
    assert dict(charged.where)["backend"] == "w1"
    assert only(found, "spent", subject="tenant").difference == lost.charged_nano_usd


async def test_rollups_that_are_off(busy_world: World) -> None:
    await busy_world.drainer.drain_once()
    await busy_world.sql("UPDATE usage_rollup SET requests = 2 * requests WHERE route = 'other' AND backend = 'w1'")
    await busy_world.sql(
        "INSERT INTO usage_rollup SELECT bucket - interval '1 day', tenant_id, project_id, 'gone', route, backend, "
        "status, requests, prompt_tokens, completion_tokens, cached_tokens, cache_write_tokens, reasoning_tokens, "
        "images, compute_us, charged_nano_usd, cost_nano_usd FROM usage_rollup LIMIT 1"
    )
    for of_all in (True, False):
        found = await busy_world.verify(of_all=of_all)
        assert kinds(found) == {"rollup"}
        doubled = only(found, "rollup", route="other", sum="requests")
        assert doubled.found == 2 * doubled.expected > 0
        assert only(found, "rollup", key="gone", sum="requests").expected == 0


async def test_months_that_retention_dropped_are_known_by_their_sums(busy_world: World) -> None:
    await busy_world.drainer.drain_once()
    await busy_world.sql("UPDATE limits SET \"window\" = 'total' WHERE metric = 'budget' AND subject = 'end_user'")
    await busy_world.sql(
        "INSERT INTO audit_log (id, actor, action, kind, target) "
        "VALUES (:id, 'retention', 'drop', 'ledger_month', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM'))",
        id=uuid7(),
    )
    found = await busy_world.verify()
    assert kinds(found) <= {"requests", "tokens"}  # nobody drops a month in which windows run
    assert found.unchecked == 2


async def test_a_row_that_came_twice(busy_world: World) -> None:
    await busy_world.drainer.drain_once()
    await busy_world.sql(
        "INSERT INTO usage_events SELECT * FROM (SELECT (json_populate_record(e, json_build_object("
        "'admitted_at', e.admitted_at - interval '1 second'))).* FROM usage_events e ORDER BY request_id LIMIT 1) d"
    )
    found = await busy_world.verify()
    assert "row" in kinds(found)
    twice = only(found, "row")
    assert (twice.expected, twice.found, twice.tenant_id) == (1, 2, busy_world.tenant_id)


async def test_slots_and_leases_of_nobody(busy_world: World) -> None:
    spelled = keys.of_tenant(busy_world.tenant_id)
    ghost, ghost_slot = str(uuid7()), str(uuid7())
    end = 2 * 10**12
    await busy_world.redis("ZADD", spelled.live, end, ghost)
    await busy_world.redis("ZADD", spelled.leases, end, ghost)
    await busy_world.redis("ZADD", busy_world.counter("c::model:tiny"), end, ghost_slot)
    found = await busy_world.verify()
    assert kinds(found) == {"slot", "lease"}
    assert only(found, "lease", request=ghost).found == 1
    assert "no reservation" in only(found, "slot", request=ghost).meaning
    assert only(found, "slot", request=ghost_slot, subject="model").found == 1


async def test_a_running_request_without_its_slot(busy_world: World) -> None:
    ticket = await busy_world.take()
    await busy_world.redis("ZREM", busy_world.counter("c::model:tiny"), str(ticket.request_id))
    found = await busy_world.verify()
    assert only(found, "slot", request=str(ticket.request_id)).expected == 1
    assert len(found.differences) == 1


async def test_a_leaked_reservation(busy_world: World) -> None:
    ticket = await busy_world.take()
    spelled, request_id = keys.of_tenant(busy_world.tenant_id), str(ticket.request_id)
    await busy_world.redis("ZREM", spelled.leases, request_id)
    found = await busy_world.verify()
    assert only(found, "reservation", request=request_id).tenant_id == busy_world.tenant_id
    await busy_world.redis("ZREM", spelled.live, request_id)
    await busy_world.redis("ZREM", busy_world.counter("c::model:tiny"), request_id)
    found = await busy_world.verify(of_all=False)
    assert kinds(found) == {"reservation", "reserved", "requests", "tokens"}
    assert only(found, "reserved", subject="tenant").difference == BOUND.nano_usd


async def test_a_lease_that_nobody_sweeps_and_a_tombstone_without_end(busy_world: World) -> None:
    open_, ended = await busy_world.take(), await busy_world.serve(3)
    spelled = keys.of_tenant(busy_world.tenant_id)
    await busy_world.redis("ZADD", spelled.leases, 1, str(open_.request_id))
    await busy_world.redis("PERSIST", spelled.request(ended.request_id))
    found = await busy_world.verify()
    assert only(found, "lease", request=str(open_.request_id)).tenant_id == busy_world.tenant_id
    assert only(found, "tombstone", request=str(ended.request_id)).found == 1
    assert len(found.differences) == 2


async def test_what_was_set_aside_is_counted_and_no_difference(busy_world: World) -> None:
    await busy_world.sql("ALTER TABLE usage_events ADD CONSTRAINT curse CHECK (backend <> 'w1') NOT VALID")
    await busy_world.drainer.drain_once()
    found = await busy_world.verify()
    assert (found.differences, found.busy) == ([], [])
    assert found.dead == 2


async def test_refusals_that_can_never_be_counted(busy_world: World) -> None:
    spelled = keys.of_tenant(busy_world.tenant_id)
    await busy_world.redis("HSET", spelled.refusals, "what is this", 1)
    await busy_world.redis("HSET", spelled.refusals, f"{busy_world.tenant_id}|key|requests|1790000000", 5)
    found = await busy_world.verify()
    assert only(found, "refusals").where[1] == ("field", "what is this")
    assert found.refusals_waiting == 5


async def test_windows_younger_than_their_length_are_not_judged(world: World) -> None:
    await world.serve(1)
    await world.sql("UPDATE limits SET created_at = now()")
    for counter in ("r:hour:tenant:", f"t:day:project:{world.principal.project_id}"):
        await world.redis("HSET", world.counter(counter), "epoch", "")
    await world.redis("SET", keys.of_tenant(world.tenant_id).epoch, 1)
    found = await world.verify()
    assert (found.differences, found.unchecked) == ([], 2)
    await world.sql("DELETE FROM limits WHERE metric = 'budget'")
    await world.redis("HINCRBY", world.counter("b:month:tenant:"), "spent", 1)
    assert (await world.verify()).differences == []
