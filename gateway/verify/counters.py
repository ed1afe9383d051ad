"""One tenant's counters in Redis against its rows, its events on their way to the ledger and its open requests.

Requests end while this reads. Redis is read first, in one step; what the ledger has of requests that were open then, or
came later, is left out. So the sums are those of that moment, however many requests come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.periods import from_ms, to_ms
from gateway.admission.plan import BUCKETS, Counter, bucket_ms
from gateway.admission.rebuild import counted, requests_of, tokens_of
from gateway.admission.redis import RedisClient
from gateway.admission.snapshot import RunningRequest, Slots, TenantCounters, snapshot
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from gateway.db.tables import limits
from gateway.verify.dead_charges import dead_charges, explains
from gateway.verify.difference import Difference
from gateway.verify.rows import LedgerView

TIMEOUT_S = 600.0
REPEATABLE_READ = text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
_SLACK = timedelta(seconds=10)
"""Until every gateway knows of a new limit."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What one look at a tenant came to."""

    counters: int
    running: int
    unchecked: int
    """Windows younger than their length and budgets of end users whose rows were dropped."""
    differences: list[Difference]


async def check_counters(
    redis: RedisClient, engine: AsyncEngine, tenant_id: UUID, *, dropped: Sequence[str]
) -> Checked:
    """Raises RedisUnavailable, DatabaseUnavailable."""
    seen = await snapshot(redis, tenant_id)
    if not (seen.budgets or seen.windows or seen.requests or len(seen.slots) > 1):
        return Checked(0, 0, 0, [])
    running = {request.request_id for request in seen.requests if request.state != "unknown"}
    async with transaction(engine, timeout_s=TIMEOUT_S) as connection:
        await connection.execute(REPEATABLE_READ)
        rows = await connection.execute(select(limits.c.id, limits.c.created_at).where(limits.c.tenant_id == tenant_id))
        known = {row.id: row.created_at for row in rows}
        view = LedgerView(connection, tenant_id, seen.at, running | seen.undrained.keys(), dropped)
        return await _Check(tenant_id, seen, view, known).run()


class _Check:
    def __init__(
        self,
        tenant_id: UUID,
        seen: TenantCounters,
        view: LedgerView,
        limits: Mapping[UUID, datetime],
    ) -> None:
        self._tenant_id = tenant_id
        self._seen = seen
        self._view = view
        self._limits = limits
        self._dead: list[UsageEvent] | None = None
        running = {request.request_id for request in seen.requests if request.state != "unknown"}
        self._settled = [
            event
            for request_id, event in seen.undrained.items()
            if request_id not in running and event.admitted_at <= seen.at
        ]
        self._counters = self._unchecked = 0
        self._found: list[Difference] = []

    async def run(self) -> Checked:
        await self._budgets()
        await self._windows()
        for slots in self._seen.slots:
            self._counters += 1
            self._slots(slots)
        for request in self._seen.requests:
            if request.state == "unknown":
                where = (("request", str(request.request_id)),)
                self._add("slot", where, 0, 1, "a slot is held for a request that has no reservation")
        return Checked(self._counters, len(self._seen.requests), self._unchecked, self._found)

    async def _budgets(self) -> None:
        for budget in self._seen.budgets:
            counter, start, end = budget.counter, budget.start, budget.end
            if budget.limit_id not in self._limits:
                continue  # kept no longer
            spent = await self._view.charged(counter, start, end)
            if spent is None:
                self._unchecked += 1
                continue
            self._counters += 1

            def holds(at: datetime, start: datetime = start, end: datetime = end) -> bool:
                return start <= at < end

            spent += sum(e.charged_nano_usd for e in _events(counter, self._settled) if holds(e.admitted_at))
            reserved = 0
            for request in self._running(counter):
                if holds(request.admitted_at):
                    reserved += request.bound_nano_usd if request.state == "open" else 0
                    spent += request.charged_nano_usd if request.state == "settled" else 0
            where = (*_names(counter), ("period_start", start.isoformat()))
            if spent != budget.spent and not explains(
                [e.charged_nano_usd for e in _events(counter, await self._set_aside()) if holds(e.admitted_at)],
                budget.spent - spent,
            ):
                self._add("spent", where, spent, budget.spent)
            if reserved != budget.reserved:
                self._add("reserved", where, reserved, budget.reserved)

    async def _windows(self) -> None:
        for counter, found in self._seen.windows.items():
            width = bucket_ms(str(counter.window))
            since = from_ms((to_ms(self._seen.at) // width - BUCKETS) * width)
            limit = self._seen.window_limits[counter]
            created_at = self._limits.get(limit.limit_id)
            if created_at is None:
                continue
            if not limit.built and created_at + _SLACK > since:
                self._unchecked += 1
                continue
            self._counters += 1
            tokens = counter.metric == "tokens"

            def amount(event: UsageEvent, tokens: bool = tokens) -> int:
                return tokens_of(event) if tokens else requests_of(event)

            expected = await self._view.used(counter, since)
            expected += sum(amount(e) for e in _events(counter, self._settled) if e.admitted_at >= since)
            for request in self._running(counter):
                if request.admitted_at >= since:
                    used = request.bound_tokens if request.state == "open" else request.tokens
                    expected += used if tokens else 1
            if expected != found and not explains(
                [amount(e) for e in _events(counter, await self._set_aside()) if e.admitted_at >= since],
                found - expected,
            ):
                self._add("tokens" if tokens else "requests", _names(counter), expected, found)

    def _slots(self, slots: Slots) -> None:
        counter = slots.counter
        live = self._seen.slots[0].leases
        for request_id in slots.leases.keys() - live.keys():
            where = (*_names(counter), ("request", str(request_id)))
            self._add("slot", where, 0, 1, "a slot is held for a request that does not run")
        if slots.counted_for in self._limits:
            for request in self._running(counter):
                if request.request_id not in slots.leases:
                    where = (*_names(counter), ("request", str(request.request_id)))
                    self._add("slot", where, 1, 0, "a running request holds no slot")

    async def _set_aside(self) -> list[UsageEvent]:
        if self._dead is None:
            self._dead = await dead_charges(self._view.connection, self._tenant_id)
        return self._dead

    def _running(self, counter: Counter) -> Iterator[RunningRequest]:
        for request in self._seen.requests:
            if request.state != "unknown" and _bears(counter, request):
                yield request

    def _add(self, kind: str, where: tuple[tuple[str, str], ...], expected: int, found: int, meaning: str = "") -> None:
        self._found.append(Difference(kind, self._tenant_id, where, expected, found, meaning))  # type: ignore[arg-type]


def _events(counter: Counter, events: Iterable[UsageEvent]) -> Iterator[UsageEvent]:
    return (event for event in events if counted(counter, event))


def _bears(counter: Counter, request: RunningRequest) -> bool:
    match counter.subject:
        case "tenant":
            return True
        case "project":
            return request.project_id == counter.target
        case "key":
            return request.key_id == counter.target
        case "model":
            return request.route == counter.target
        case "end_user":
            return request.end_user == counter.target


def _names(counter: Counter) -> tuple[tuple[str, str], ...]:
    names: list[tuple[str, str]] = [("subject", counter.subject)]
    if counter.target:
        names.append(("target", counter.target))
    if counter.window:
        names.append(("window", counter.window))
    return tuple(names)
