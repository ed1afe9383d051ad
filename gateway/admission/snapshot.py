"""All that Redis counts for one tenant at one moment, to be shown and to be compared with the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast
from uuid import UUID

from gateway.admission import keys
from gateway.admission.periods import from_ms
from gateway.admission.plan import Counter
from gateway.admission.rebuild import read_undrained
from gateway.admission.redis import RedisClient
from gateway.admission.scripts import SNAPSHOT
from gateway.billing.usage import UsageEvent
from gateway.tenants.principal import BudgetPeriod


@dataclass(frozen=True, slots=True)
class BudgetCounter:
    """A budget's running period, or the last that ran; amounts in nano-USD. ``spent`` is what requests admitted in
    the period were charged once settled, ``reserved`` the bounds of those that are open."""

    counter: Counter
    start: datetime
    end: datetime
    spent: int
    reserved: int
    limit_id: UUID
    """For which it is kept. Once that limit is gone, it is kept no longer, and ends with its period."""

    @property
    def period(self) -> BudgetPeriod:
        return cast(BudgetPeriod, self.counter.window)


@dataclass(frozen=True, slots=True)
class Slots:
    """Running requests of one subject, each with the end of its lease. One whose lease ran out holds its slot until the
    janitor has settled it."""

    counter: Counter
    leases: dict[UUID, datetime]
    counted_for: UUID | None = None
    """The limit for which all that hold a slot were counted; None: those who came before it may be missing."""

    @property
    def live(self) -> int:
        return len(self.leases)


@dataclass(frozen=True, slots=True)
class WindowLimit:
    """For which limit a window is kept. ``built``: from the ledger; else it counts since Redis knows that limit."""

    limit_id: UUID
    built: bool


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """``open``: reserved, to be settled. ``settled``: by the janitor, but its gateway woke and still serves it.
    ``unknown``: it has a lease and no reservation, which should not be."""

    request_id: UUID
    state: Literal["open", "settled", "unknown"]
    admitted_at: datetime
    bound_nano_usd: int
    bound_tokens: int
    charged_nano_usd: int
    """As last checkpointed."""
    tokens: int
    end_user: str | None
    project_id: str
    key_id: str
    route: str


@dataclass(frozen=True, slots=True)
class TenantCounters:
    """``settlements`` counts since Redis knows the tenant: with the same number, none came between two snapshots."""

    at: datetime
    epoch: datetime | None
    """From when on the tenant's shard admits; None: it is empty."""
    settlements: int
    budgets: tuple[BudgetCounter, ...]
    windows: dict[Counter, int]
    """Requests or tokens in the last sixty buckets of the window and the running one."""
    window_limits: dict[Counter, WindowLimit]
    slots: tuple[Slots, ...]
    """The tenant's own first, whether they are limited or not."""
    requests: tuple[RunningRequest, ...]
    undrained: dict[UUID, UsageEvent]
    """Settled requests whose events wait for the ledger, read after the rest; the latest revision of each."""

    @property
    def live(self) -> int:
        """Requests of the tenant that hold a slot."""
        return self.slots[0].live


async def snapshot(redis: RedisClient, tenant_id: UUID) -> TenantCounters:
    """Raises RedisUnavailable. Between the counters and the events read after them a request may end, or an event may
    reach the ledger: whoever compares reads the ledger next, and then looks whether ``settlements`` is still the same.
    """
    spelled = keys.of_tenant(tenant_id)
    now, epoch, settlements, _, budgets, windows, slots, requests = await redis.run(
        SNAPSHOT,
        (spelled.tenant, spelled.live, spelled.epoch, spelled.usage),
        (redis.time_offset_ms, spelled.prefix),
    )
    undrained = await read_undrained(redis, tenant_id)
    return TenantCounters(
        at=from_ms(now),
        epoch=from_ms(int(epoch)) if epoch else None,
        settlements=settlements,
        budgets=tuple(
            BudgetCounter(
                Counter.parse(name.decode()),
                from_ms(int(start)),
                from_ms(int(end)),
                int(spent),
                int(held),
                UUID(limit.decode()),
            )
            for name, start, end, spent, held, limit in budgets
        ),
        windows={Counter.parse(name.decode()): int(sum_) for name, sum_, _, _ in windows},
        window_limits={
            Counter.parse(name.decode()): WindowLimit(UUID(limit.decode()), bool(built))
            for name, _, limit, built in windows
        },
        slots=tuple(
            Slots(Counter.parse(name.decode()), _leases(members), UUID(limit.decode()) if limit else None)
            for name, members, limit in slots
        ),
        requests=tuple(_request(row) for row in requests),
        undrained=undrained.events,
    )


def _leases(members: list[bytes]) -> dict[UUID, datetime]:
    pairs = zip(members[::2], members[1::2], strict=True)
    return {UUID(member.decode()): from_ms(int(float(end))) for member, end in pairs}


def _request(row: list[bytes]) -> RunningRequest:
    request_id, state, _by, admitted, *numbers, user, project, key_id, route = (field.decode() for field in row)
    bound, tokens, charged, used = (int(number or 0) for number in numbers)
    known: Any = state if state in ("open", "settled") else "unknown"
    return RunningRequest(
        UUID(request_id), known, from_ms(int(admitted or 0)), bound, tokens, charged, used, user or None, project,
        key_id, route,
    )  # fmt: skip
