"""What the admission tests share: tenants made on the spot, a ledger that the stream is moved into, admissions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec
import pytest

from gateway.admission import keys
from gateway.admission.periods import to_ms
from gateway.admission.plan import Counter
from gateway.admission.rebuild import LedgerSums, counted, requests_of, tokens_of
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Draft, Ticket
from gateway.billing.prices import Price, Tariff
from gateway.billing.usage import UsageEvent
from gateway.clock import SystemClock
from gateway.ids import uuid7
from gateway.redis_url import client as redis_client
from gateway.tenants.principal import (
    NO_PROJECT,
    BudgetPeriod,
    Limit,
    Metric,
    Principal,
    RateWindow,
    RedisLossPolicy,
    Subject,
)

LEASE_S = 9.5
PRICE = Price(uuid7(), "tiny", Decimal("1"), Decimal("2"), datetime(2026, 1, 1, tzinfo=UTC))
"""1,000 nano-USD a prompt token, 2,000 an output token."""
TARIFF = Tariff(PRICE, PRICE)
DRAFT = Draft("tiny", TARIFF)
NOTHING = Bound(0, 0)
UNTIL_CLOSED_S = 3600.0
on_both = pytest.mark.parametrize("redis_url", ["server", "cluster"], indirect=True)
"""Runs a test on one server and on a cluster of three. ``TEST_REDIS_URL=cluster`` runs all of them on a cluster."""


def limit(
    metric: Metric,
    amount: int,
    window: RateWindow | BudgetPeriod | None = None,
    subject: Subject = "tenant",
    target: str = "",
    *,
    hard: bool = True,
    thresholds: tuple[int, ...] = (),
) -> Limit:
    """Without a window: requests and tokens per minute; a budget in all, so that no test depends on the time of day at
    which it runs."""
    if window is None and metric != "concurrent":
        window = "total" if metric == "budget" else "minute"
    return Limit(uuid7(), subject, target, metric, window, amount, hard, thresholds)


def tenant(
    rpm: int | None = None,
    slots: int | None = None,
    budget: int | tuple[int, BudgetPeriod] | None = None,
    *limits: Limit,
    generation: int = 1,
    tenant_id: UUID | None = None,
    key: str = "key1",
    project: UUID | None = None,
    timezone: str = "UTC",
    redis_loss: RedisLossPolicy = "fail_closed",
) -> Principal:
    """A tenant that nobody has heard of before. ``budget``: nano-USD, in all or in a period."""
    chosen = list(limits)
    if budget is not None:
        amount, period = budget if isinstance(budget, tuple) else (budget, None)
        chosen.insert(0, limit("budget", amount, period))
    if rpm is not None:
        chosen.append(limit("requests", rpm))
    if slots is not None:
        chosen.append(limit("concurrent", slots))
    return Principal(
        tenant_id or uuid7(),
        "acme",
        key,
        frozenset({"inference"}),
        generation,
        "salt",
        project_id=project or NO_PROJECT,
        timezone=timezone,
        tenant_limits=tuple(chosen),
        redis_loss=redis_loss,
    )


class Totals(NamedTuple):
    """Of the tenant itself; ``spent`` and ``reserved`` are None while no budget of it was begun."""

    spent: int | None
    reserved: int | None
    live: int
    window: int
    """Requests in the minute's window."""


async def totals(admission: Admission, tenant_id: UUID, period: BudgetPeriod | None = None) -> Totals:
    found = await admission.counters(tenant_id)
    [budget] = [
        each for each in found.budgets if each.counter.subject == "tenant" and period in (None, each.counter.window)
    ] or [None]
    window = found.windows.get(Counter("requests", "minute", "tenant", ""), 0)
    return Totals(budget and budget.spent, budget and budget.reserved, found.live, window)


@dataclass
class Ledger:
    """Stands for Postgres: keeps rows as the drainer would, one a request, the last revision of it."""

    redis_url: str
    rows: dict[UUID, tuple[int, UsageEvent]] = field(default_factory=dict)
    readings: int = 0

    async def charged(
        self,
        tenant_id: UUID,
        start: datetime,
        end: datetime,
        *,
        subject: Subject,
        target: str,
        excluding: Collection[UUID],
    ) -> int:
        await self.read()
        return sum(
            event.charged_nano_usd
            for event in self._of(tenant_id, subject, target, excluding)
            if start <= event.admitted_at < end
        )

    async def used(
        self,
        tenant_id: UUID,
        since: datetime,
        *,
        width_s: int,
        subject: Subject,
        target: str,
        excluding: Collection[UUID],
    ) -> list[tuple[int, int, int]]:
        await self.read()
        return [
            (to_ms(event.admitted_at) // (width_s * 1000), requests_of(event), tokens_of(event))
            for event in self._of(tenant_id, subject, target, excluding)
            if event.admitted_at >= since
        ]

    async def read(self) -> None:
        """Called at each reading; tests put trouble here."""
        self.readings += 1

    def _of(self, tenant_id: UUID, subject: Subject, target: str, excluding: Collection[UUID]) -> list[UsageEvent]:
        counter = Counter("budget", "total", subject, target)
        return [
            event
            for _, event in self.rows.values()
            if event.tenant_id == tenant_id and event.request_id not in excluding and counted(counter, event)
        ]

    def entries(self, shard: str) -> list[tuple[bytes, int, UsageEvent]]:
        """What waits in a shard's stream: id, revision, event."""
        with redis_client(self.redis_url) as client:
            found = client.execute_command("XRANGE", keys.usage(shard), "-", "+")
        return [
            (entry, int(fields[b"revision"]), msgspec.json.decode(fields[b"event"], type=UsageEvent))
            for entry, fields in found
        ]

    def drain(self, shard: str) -> None:
        """Move the shard's stream here."""
        with redis_client(self.redis_url) as client:
            for entry, revision, event in self.entries(shard):
                if revision > self.rows.get(event.request_id, (0, event))[0]:
                    self.rows[event.request_id] = (revision, event)
                client.xdel(keys.usage(shard), entry)

    def events(self, principal: Principal) -> list[UsageEvent]:
        """The tenant's rows, after draining, by time."""
        self.drain(principal.shard)
        rows = [event for _, event in self.rows.values() if event.tenant_id == principal.tenant_id]
        return sorted(rows, key=lambda event: event.request_id)


@asynccontextmanager
async def admission(
    redis_url: str,
    ledger: LedgerSums,
    *,
    lease_s: float = LEASE_S,
    renewal_s: float = UNTIL_CLOSED_S,
    timeout_s: float = 2.0,
    **options: float,
) -> AsyncIterator[Admission]:
    """A started Admission. Unless ``renewal_s`` is given its heartbeat and its janitor do not run by themselves."""
    opened = Admission(
        redis_url,
        SystemClock(),
        lease_s=lease_s,
        renewal_s=renewal_s,
        timeout_s=timeout_s,
        ledger=ledger,
        **options,
    )
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()


async def take(
    admission: Admission, principal: Principal, bound: int = 0, draft: Draft = DRAFT, *, tokens: int = 0
) -> Ticket:
    return await admission.admit(uuid7(), principal, draft=draft, bound=Bound(bound, tokens))


def advance(seconds: float, *admissions: Admission) -> None:
    """Move the scripts' clock of these admissions ahead."""
    for each in admissions:
        each._redis.time_offset_ms += round(seconds * 1000)


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)
