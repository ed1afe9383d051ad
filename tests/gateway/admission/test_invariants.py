"""Any interleaving of admissions, settlements, deaths and sweeps, against a plain model of the rules."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.admission.errors import Refused
from gateway.admission.service import Admission
from gateway.admission.ticket import Ticket
from gateway.billing.usage import Status, TokenUsage
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import LEASE_S, Ledger, admission, advance, take, tenant

# Each example begins at 0.1 s past a second, at noon, and counts only while that second lasts, so that whole seconds of
# the model are whole seconds of Redis.
NOON = 43_200
DAY = 86_400
LONGEST_EXAMPLE_S = 0.8


@dataclass
class Request:
    """A request of the model. Times are seconds since the example began, amounts nano-USD."""

    ticket: Ticket
    admitted: int
    bound: int
    expiry: float
    kept: tuple[int, int] = (0, 0)
    seen: tuple[int, int] = (0, 0)
    rows: list[tuple[str, int]] = field(default_factory=list)
    by_gateway: bool = False
    refunded: bool = False
    resumed: bool = False

    @property
    def open(self) -> bool:
        return not self.rows

    @property
    def charged(self) -> int:
        return self.rows[-1][1] if self.rows else 0

    def day(self) -> int:
        return (NOON + self.admitted) // DAY


def price(prompt: int, completion: int) -> int:
    return prompt * 1000 + completion * 2000


class Model:
    def __init__(self, rpm: int | None, slots: int | None, budget: int | None) -> None:
        self.rpm, self.slots, self.budget = rpm, slots, budget
        self.now = 0
        self.period: int | None = None
        self.requests: list[Request] = []

    def spent(self) -> int:
        return sum(each.charged for each in self.requests if each.day() == self.period)

    def reserved(self) -> int:
        return sum(each.bound for each in self.requests if each.open and each.day() == self.period)

    def live(self) -> int:
        return sum((each.open or each.resumed) and each.expiry > self.now for each in self.requests)

    def window(self) -> int:
        return sum(self.now - each.admitted <= 60 and not each.refunded for each in self.requests)

    def verdict(self, bound: int) -> str | None:
        if self.budget is not None:
            self.period = (NOON + self.now) // DAY
            if self.spent() + self.reserved() + bound > self.budget:
                return "budget"
        if self.rpm is not None and self.window() + 1 > self.rpm:
            return "requests"
        if self.slots is not None and self.live() + 1 > self.slots:
            return "concurrent"
        return None

    def settle(self, request: Request, status: Status, tokens: tuple[int, int], *, refund: bool) -> None:
        if request.by_gateway:
            return
        charged = 0 if status == "failed" and tokens[1] == 0 else price(*tokens)
        request.rows.append((status, charged))
        request.by_gateway, request.resumed = True, False
        request.refunded = refund

    def expire(self) -> int:
        settled = 0
        for request in self.requests:
            if request.expiry <= self.now:
                if request.open:
                    request.rows.append(("abandoned", price(*request.kept)))
                    settled += 1
                request.resumed = False
        return settled

    def renew(self, gateway: Admission) -> None:
        for request in self.requests:
            if request.by_gateway or request.ticket.request_id not in gateway._leases._live:
                continue
            if request.open:
                request.kept = request.seen
            else:
                request.resumed = True
            request.expiry = self.now + LEASE_S


tokens = st.tuples(st.integers(0, 40), st.integers(0, 40))
indices = st.integers(0, 30)
operations = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 1), st.integers(0, 60_000)),
    st.tuples(st.just("admit"), st.integers(0, 1), st.integers(0, 60_000)),
    st.tuples(st.just("settle"), indices, st.sampled_from(["ok", "aborted", "failed"]), tokens, st.integers(0, 2)),
    st.tuples(st.just("checkpoint"), indices, tokens),
    st.tuples(st.just("renew"), st.integers(0, 1)),
    st.tuples(st.just("die"), indices),
    st.tuples(st.just("expire"), st.integers(0, 1)),
    st.tuples(st.just("advance"), st.sampled_from([1, 3, 9, 10, 30, 60, 61, DAY // 2, DAY])),
    st.tuples(st.just("repeat"), st.integers(0, 1)),
    st.tuples(st.just("drain")),
)


class Example:
    """One run of operations on two gateways and the model side by side."""

    def __init__(self, gateways: tuple[Admission, Admission], ledger: Ledger, principal: Principal) -> None:
        self.gateways, self.ledger, self.principal = gateways, ledger, principal
        self.began = time.monotonic()
        limits = principal.limits
        self.model = Model(
            limits.requests_per_minute, limits.max_concurrent, limits.budget.amount if limits.budget else None
        )

    async def step(self, operation: tuple[Any, ...]) -> None:
        name, *arguments = operation
        await getattr(self, name)(*arguments)
        counters = await self.gateways[0].counters(self.principal.tenant_id)
        self.in_time()
        assert counters.live == self.model.live()
        if self.model.period is not None:
            assert (counters.spent, counters.reserved) == (self.model.spent(), self.model.reserved())

    def in_time(self) -> None:
        assume(time.monotonic() - self.began < LONGEST_EXAMPLE_S)

    async def admit(self, which: int, bound: int) -> None:
        expected = self.model.verdict(bound)
        try:
            ticket = await take(self.gateways[which], self.principal, bound)
        except Refused as refused:
            self.in_time()
            assert refused.reason == expected
            return
        self.in_time()
        assert expected is None
        self.model.requests.append(Request(ticket, self.model.now, bound, self.model.now + LEASE_S))

    def pick(self, index: int) -> Request | None:
        return self.model.requests[index % len(self.model.requests)] if self.model.requests else None

    async def settle(self, index: int, status: Status, tokens: tuple[int, int], attempts: int) -> None:
        if request := self.pick(index):
            request.ticket.settle(status, TokenUsage(*tokens), attempts=attempts)
            await request.ticket.settled()
            self.model.settle(request, status, tokens, refund=status == "failed" and attempts == 0)

    async def checkpoint(self, index: int, tokens: tuple[int, int]) -> None:
        if (request := self.pick(index)) and not request.by_gateway:
            request.ticket.checkpoint(TokenUsage(*tokens), "w1")
            request.seen = tokens

    async def renew(self, which: int) -> None:
        await self.gateways[which]._leases.renew()
        self.model.renew(self.gateways[which])

    async def die(self, index: int) -> None:
        """The gateway forgets the request; its handler may still come back and settle it, as after a long sleep."""
        if request := self.pick(index):
            for gateway in self.gateways:
                gateway._leases.remove(request.ticket.request_id)

    async def expire(self, which: int) -> None:
        # Other examples left running requests behind; only this tenant's are looked at.
        await self.gateways[which].expire_leases()
        self.model.expire()

    async def advance(self, seconds: int) -> None:
        advance(seconds, *self.gateways)
        self.model.now += seconds

    async def repeat(self, which: int) -> None:
        """Redis came back: what was settled lately is sent once more."""
        self.gateways[which]._settlements.resend()
        await self.gateways[which]._settlements.drained()

    async def drain(self) -> None:
        self.ledger.drain(self.principal.shard)

    def check_rows(self) -> None:
        settled = [request for request in self.model.requests if request.rows]
        assert {event.request_id for event in self.ledger.events(self.principal)} == {
            request.ticket.request_id for request in settled
        }
        for request in settled:
            revision, event = self.ledger.rows[request.ticket.request_id]
            assert revision == len(request.rows)
            assert (event.status, event.charged_nano_usd) == request.rows[-1]
            assert event.admitted_at == request.ticket.admitted_at


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 4),
    st.none() | st.integers(0, 200_000),
    st.lists(operations, max_size=40),
)
def test_redis_counts_as_the_rules_say(
    redis_server: str, rpm: int | None, slots: int | None, budget: int | None, steps: list[tuple[Any, ...]]
) -> None:
    async def run() -> None:
        ledger = Ledger(redis_server)
        async with admission(redis_server, ledger) as one, admission(redis_server, ledger) as two:
            seconds, micros = await one._redis.command("TIME")
            now = int(seconds) + int(micros) / 1e6
            advance(int(now) // DAY * DAY + DAY + NOON + 0.1 - now, one, two)
            example = Example((one, two), ledger, tenant(rpm, slots, budget))
            for operation in steps:
                await example.step(operation)
            example.check_rows()

    asyncio.run(run())
