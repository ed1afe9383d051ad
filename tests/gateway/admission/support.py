"""What the admission tests share: tenants made on the spot, a ledger that the stream is moved into, admissions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec
import redis

from gateway.admission import keys
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Draft, Ticket
from gateway.billing.usage import Price, UsageEvent
from gateway.clock import SystemClock
from gateway.ids import uuid7
from gateway.tenants.principal import Budget, Limits, Principal

LEASE_S = 9.5
PRICE = Price(uuid7(), "tiny", Decimal("1"), Decimal("2"), datetime(2026, 1, 1, tzinfo=UTC))
"""1,000 nano-USD a prompt token, 2,000 an output token."""
DRAFT = Draft("tiny", PRICE)
NOTHING = Bound(0, 0)
UNTIL_CLOSED_S = 3600.0


def tenant(
    rpm: int | None = None,
    slots: int | None = None,
    budget: int | Budget | None = None,
    *,
    generation: int = 1,
    tenant_id: UUID | None = None,
) -> Principal:
    """A tenant that nobody has heard of before. ``budget`` as a number: nano-USD in all, so that no test depends on the
    time of day at which it runs."""
    if isinstance(budget, int):
        budget = Budget(budget, "total", "UTC")
    limits = Limits(rpm, slots, budget)
    return Principal(tenant_id or uuid7(), "acme", "key1", frozenset({"inference"}), limits, generation, "salt")


@dataclass
class Ledger:
    """Stands for Postgres: keeps rows as the drainer would, one a request, the last revision of it."""

    redis_url: str
    rows: dict[UUID, tuple[int, UsageEvent]] = field(default_factory=dict)
    readings: int = 0

    async def spent(self, tenant_id: UUID, start: datetime, end: datetime, excluding: Collection[UUID]) -> int:
        self.readings += 1
        return sum(
            event.charged_nano_usd
            for _, event in self.rows.values()
            if event.tenant_id == tenant_id and start <= event.admitted_at < end and event.request_id not in excluding
        )

    def entries(self, shard: str) -> list[tuple[bytes, int, UsageEvent]]:
        """What waits in a shard's stream: id, revision, event."""
        with redis.Redis.from_url(self.redis_url) as client:
            found = client.execute_command("XRANGE", keys.usage(shard), "-", "+")
        return [
            (entry, int(fields[b"revision"]), msgspec.json.decode(fields[b"event"], type=UsageEvent))
            for entry, fields in found
        ]

    def drain(self, shard: str) -> None:
        """Move the shard's stream here."""
        with redis.Redis.from_url(self.redis_url) as client:
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
    ledger: Ledger,
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
        spent=ledger.spent,
        **options,
    )
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()


async def take(admission: Admission, principal: Principal, bound: int = 0, draft: Draft = DRAFT) -> Ticket:
    return await admission.admit(uuid7(), principal, draft=draft, bound=Bound(bound, 0))


def advance(seconds: float, *admissions: Admission) -> None:
    """Move the scripts' clock of these admissions ahead."""
    for each in admissions:
        each._redis.time_offset_ms += round(seconds * 1000)


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)
