"""Any interleaving of admissions, settlements, deaths, sweeps and losses, against a plain model of the rules."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args
from uuid import UUID

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.admission import keys
from gateway.admission.errors import Refused
from gateway.admission.periods import to_ms
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Draft
from gateway.billing.usage import Status, TokenUsage
from gateway.ids import uuid7
from gateway.redis_url import client as redis_client
from gateway.tenants.principal import BudgetPeriod, Limit, Principal, RateWindow, Subject
from tests.gateway.admission.model import Ask, Model, Request
from tests.gateway.admission.support import TARIFF, Ledger, admission, limit, tenant
from tests.redis_cluster import RedisCluster

# Before each step the clock of the scripts is set to 0.1 s past a whole second of the model, so that a step may take
# 0.4 s and is still one moment, for windows as for leases. A run in which one takes longer does not count.
DAY = 86_400
NOON = 43_200
PROJECTS = (UUID(int=1), UUID(int=2))
KEYS = (("key1", PROJECTS[0]), ("key2", PROJECTS[0]), ("key3", PROJECTS[1]))
ROUTES = ("tiny", "large")
USERS = (None, "ada", "bob")
TARGETS: dict[Subject, tuple[str, ...]] = {
    "tenant": ("",),
    "project": tuple(map(str, PROJECTS)),
    "key": ("key1", "key2"),
    "model": ROUTES,
    "end_user": ("", "ada"),
}


COUNTING = (
    limit("budget", 0, "month", hard=False),
    limit("requests", 0, "hour", "key", "key1", hard=False),
    limit("tokens", 0, "day", "end_user", hard=False),
)
"""Refuse nothing; what they count is compared all the same."""


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    subject = draw(st.sampled_from(list(TARGETS)))
    target = draw(st.sampled_from(TARGETS[subject]))
    hard = draw(st.integers(0, 4)) > 0
    metric = draw(st.sampled_from(["budget", "requests", "tokens", "concurrent"]))
    match metric:
        case "budget":
            window, amount = draw(st.sampled_from(get_args(BudgetPeriod))), draw(st.integers(0, 400_000))
        case "requests":
            window, amount = draw(st.sampled_from(get_args(RateWindow))), draw(st.integers(0, 8))
        case "tokens":
            window, amount = draw(st.sampled_from(get_args(RateWindow))), draw(st.integers(0, 600))
        case _:
            window, amount = None, draw(st.integers(0, 4))
    return limit(metric, amount, window, subject, target, hard=hard)  # type: ignore[arg-type]


def name_of(each: Limit) -> tuple[object, ...]:
    return each.subject, each.target, each.metric, each.window


tokens = st.tuples(st.integers(0, 40), st.integers(0, 40))
indices = st.integers(-12, -1)
gateways = st.integers(0, 1)
admissions = st.tuples(
    st.just("admit"),
    gateways,
    st.integers(0, len(KEYS) - 1),
    st.sampled_from(ROUTES),
    st.sampled_from(USERS),
    st.integers(0, 60_000),
    st.integers(0, 100),
)
operations = st.one_of(
    admissions,
    admissions,
    admissions,
    st.tuples(st.just("settle"), indices, st.sampled_from(["ok", "aborted", "failed"]), tokens, st.integers(0, 2)),
    st.tuples(st.just("settle"), indices, st.sampled_from(["ok", "aborted", "failed"]), tokens, st.integers(0, 2)),
    st.tuples(st.just("checkpoint"), indices, tokens),
    st.tuples(st.just("renew"), gateways),
    st.tuples(st.just("silence"), tokens, st.booleans()),
    st.tuples(st.just("die"), indices),
    st.tuples(st.just("expire"), gateways),
    st.tuples(st.just("advance"), st.sampled_from([1, 3, 9, 10, 10, 30, 60, 61, 600, 3660, DAY // 2, DAY])),
    st.tuples(st.just("repeat"), gateways),
    st.tuples(st.just("drain")),
    st.tuples(st.just("flush"), st.booleans()),
    st.tuples(st.just("forget"), indices),
)


class Example:
    """One run of operations on two gateways and the model side by side."""

    def __init__(
        self, gates: tuple[Admission, Admission], ledger: Ledger, principals: list[Principal], model: Model
    ) -> None:
        self.gates, self.ledger, self.principals, self.model = gates, ledger, principals, model
        self.began = time.monotonic()
        self.tenant_id, self.shard = principals[0].tenant_id, principals[0].shard

    async def step(self, operation: tuple[Any, ...]) -> None:
        name, *arguments = operation
        await self.set_clocks()
        await getattr(self, name)(*arguments)
        await self.in_time()
        await self.compare()
        await self.in_time()

    async def set_clocks(self) -> None:
        for gate in self.gates:
            seconds, micros = await gate._redis.command("TIME")
            gate._redis.time_offset_ms = self.model.now * 1000 + 100 - int(seconds) * 1000 - int(micros) // 1000

    async def in_time(self) -> None:
        assume(to_ms(await self.gates[0]._redis_time()) - self.model.now * 1000 < 500)

    async def compare(self) -> None:
        found, model = await self.gates[0].counters(self.tenant_id), self.model
        for budget in found.budgets:
            assert (budget.spent, budget.reserved) == model.money(budget.counter, budget.start, budget.end), budget
        for counter, amount in found.windows.items():
            assert amount == sum(model.buckets(counter).values()), counter
        for slots in found.slots:
            assert slots.live == model.live(slots.counter), slots
        assert {each.request_id for each in found.requests if each.state == "open"} <= {
            each.ticket.request_id for each in model.requests if each.open
        }
        assert all(each.state != "unknown" for each in found.requests)

    async def admit(self, which: int, key: int, route: str, user: str | None, bound: int, used: int) -> None:
        ask = Ask(self.principals[key], route, user, bound, used)
        expected = self.model.verdict(ask)
        draft = Draft(route, TARIFF, end_user=user)
        try:
            ticket = await self.gates[which].admit(uuid7(), ask.principal, draft=draft, bound=Bound(bound, used))
        except Refused as refused:
            limit = expected.limit
            await self.in_time()
            assert limit is not None, refused
            told = (refused.reason, refused.subject, refused.window, refused.limit)
            assert told == (limit.metric, limit.subject, limit.window, limit.amount)
            if expected.wait is not None and refused.reason in ("requests", "tokens"):
                assert refused.retry_after_s is not None
                assert 0 < expected.wait - refused.retry_after_s < 1
            self.check_headers(ask, refused.headers)
            return
        await self.in_time()
        assert expected.limit is None
        self.model.admit(ask, ticket)
        self.check_headers(ask, ticket.headers)
        found = await self.gates[which].counters(self.tenant_id)
        told = {each.counter for each in found.budgets} | found.windows.keys()
        assert told >= {each for _, each in self.model.counters(ask) if each.metric != "concurrent"}

    def check_headers(self, ask: Ask, headers: dict[str, str]) -> None:
        for metric in ("requests", "tokens"):
            left = self.model.remaining(ask, metric)
            assert headers.get(f"x-ratelimit-remaining-{metric}") == (None if left is None else str(left))

    def pick(self, index: int) -> Request | None:
        """One of the latest, and mostly one that its gateway has not settled."""
        unsettled = [request for request in self.model.requests if not request.by_gateway]
        some = self.model.requests if index % 4 == 0 or not unsettled else unsettled
        return some[index % len(some)] if some else None

    async def settle(self, index: int, status: Status, used: tuple[int, int], attempts: int) -> None:
        if request := self.pick(index):
            request.ticket.settle(status, TokenUsage(*used), attempts=attempts)
            await request.ticket.settled()
            self.model.settle(request, status, used, refund=status == "failed" and attempts == 0)

    async def checkpoint(self, index: int, used: tuple[int, int]) -> None:
        if (request := self.pick(index)) and not request.by_gateway:
            request.ticket.checkpoint(TokenUsage(*used), "w1")
            request.seen = used

    async def renew(self, which: int) -> None:
        await self.gates[which]._leases.renew()
        self.model.renew(self.running(self.gates[which]))

    async def die(self, index: int) -> None:
        """The gateway forgets the request; its handler may still come back and settle it, as after a long sleep."""
        if request := self.pick(index):
            for gate in self.gates:
                gate._leases.remove(request.ticket.request_id)

    async def expire(self, which: int) -> None:
        # Other examples left running requests behind; only this tenant's are looked at.
        await self.gates[which].expire_leases()
        self.model.expire()

    async def silence(self, used: tuple[int, int], awake: bool) -> None:
        """After a last checkpoint gateways are silent for longer than a lease; the janitor comes by, and then perhaps
        they wake."""
        for request in self.model.requests:
            if not request.by_gateway:
                request.ticket.checkpoint(TokenUsage(*used), "w1")
                request.seen = used
        for which in (0, 1):
            await self.renew(which)
        await self.advance(10)
        await self.expire(0)
        for which in (0, 1) if awake else ():
            await self.renew(which)

    async def advance(self, seconds: int) -> None:
        self.model.now += seconds
        await self.set_clocks()

    async def repeat(self, which: int) -> None:
        """Redis came back: what was settled lately is sent once more."""
        self.gates[which]._settlements.resend()
        await self.gates[which]._settlements.drained()

    async def drain(self) -> None:
        self.ledger.drain(self.shard)

    async def flush(self, drained: bool) -> None:
        """Redis loses everything. What only the janitor settled nobody would bring back, so that it is drained first;
        a gateway that knows nothing of the janitor's work learns of it first. Two losses are told apart by their time,
        which the clock of the model stands still for."""
        await self.advance(1)
        for which in (0, 1):
            await self.renew(which)
            await self.gates[which]._settlements.drained()
        # Gateways send again what landed in the last five seconds, and here no time passes but the machine's own.
        if (
            drained
            or time.monotonic() - self.began > 3
            or any(each.rows and not each.by_gateway for each in self.model.requests)
        ):
            await self.drain()
        with redis_client(self.ledger.redis_url) as client:
            client.flushdb()
        for gate in self.gates:
            await gate._leases.renew()
            await gate._settlements.drained()
        self.model.flush(self.running(*self.gates))

    async def forget(self, index: int) -> None:
        """One budget's counter is gone."""
        found = await self.gates[0].counters(self.tenant_id)
        if found.budgets:
            counter = found.budgets[index % len(found.budgets)].counter
            key = f"{keys.tenant(self.shard, self.tenant_id)}:{counter}"
            with redis_client(self.ledger.redis_url) as client:
                client.delete(key)

    def running(self, *gates: Admission) -> set[object]:
        return {request_id for gate in gates for request_id in gate._leases._live}

    def check_rows(self) -> None:
        settled = [request for request in self.model.requests if request.rows]
        assert {event.request_id for event in self.ledger.events(self.principals[0])} == {
            request.ticket.request_id for request in settled
        }
        for request in settled:
            revision, event = self.ledger.rows[request.ticket.request_id]
            assert revision >= len(request.rows)
            used = event.prompt_tokens + event.completion_tokens
            assert (event.status, event.charged_nano_usd, used) == request.rows[-1]
            assert event.admitted_at == request.ticket.admitted_at


def check(redis_url: str, chosen: list[Limit], steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        ledger = Ledger(redis_url)
        async with admission(redis_url, ledger) as one, admission(redis_url, ledger) as two:
            seconds, _ = await one._redis.command("TIME")
            model = Model(int(seconds) // DAY * DAY + DAY + NOON)
            tenant_id = uuid7()
            taken = set(map(name_of, chosen))
            all_limits = [*chosen, *(each for each in COUNTING if name_of(each) not in taken)]
            principals = [
                tenant(None, None, None, *all_limits, tenant_id=tenant_id, key=key, project=project)
                for key, project in KEYS
            ]
            example = Example((one, two), ledger, principals, model)
            for operation in steps:
                await example.step(operation)
            example.check_rows()

    asyncio.run(run())


# Short runs find little: a late settlement alone takes an admission, a silence, a sweep and the settlement.
cases = given(
    st.lists(limits(), min_size=1, max_size=6, unique_by=name_of), st.lists(operations, min_size=25, max_size=50)
)


@settings(max_examples=100)
@cases
def test_redis_counts_as_the_rules_say(redis_server: str, chosen: list[Limit], steps: list[tuple[Any, ...]]) -> None:
    check(redis_server, chosen, steps)


@settings(max_examples=15)
@cases
def test_a_cluster_counts_as_the_rules_say(
    redis_cluster: RedisCluster, chosen: list[Limit], steps: list[tuple[Any, ...]]
) -> None:
    check(redis_cluster.url, chosen, steps)
