"""Which limits bear on a request, packed as the admission script reads them, once for many requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from gateway.admission.periods import Period, period_at, to_ms
from gateway.admission.ticket import Blank
from gateway.tenants.principal import BudgetPeriod, Limit, Metric, Principal, RateWindow, Subject

BUCKETS: Final = 60
"""A window is counted by sixtieths of it."""
WINDOW_S: Final[dict[str, int]] = {"minute": 60, "hour": 3600, "day": 86_400}
_KINDS: Final[dict[Metric, str]] = {"budget": "b", "requests": "r", "tokens": "t", "concurrent": "c"}
_METRICS: Final = {kind: metric for metric, kind in _KINDS.items()}
_ORDER: Final = tuple(_KINDS)
"""In which limits are looked at: of several that refuse a request the first is told as the reason."""
_MOST_PRINCIPALS: Final = 20_000
_MOST_PLANS: Final = 200
TENANT_SLOTS: Final = "c::tenant:"
_pack = msgspec.msgpack.Encoder().encode


def bucket_ms(window: str) -> int:
    """Width of one bucket of a window, in milliseconds."""
    return WINDOW_S[window] * 1000 // BUCKETS


@dataclass(frozen=True, slots=True)
class Counter:
    """Names one of a tenant's counters. ``each`` tells a limit that each end user has apart from that of one."""

    metric: Metric
    window: RateWindow | BudgetPeriod | None
    subject: Subject
    target: str
    """'' for the tenant; an end user's hash, also where the limit is of each apart."""
    each: bool = False

    @classmethod
    def parse(cls, name: str) -> Counter:
        """Of a name in Redis. Raises ValueError."""
        kind, window, subject, target = name.split(":", 3)
        if kind not in _METRICS:
            raise ValueError(f"{name!r} is no counter")
        each = subject == "each"
        return cls(_METRICS[kind], window or None, "end_user" if each else subject, target, each)  # type: ignore[arg-type]

    @classmethod
    def of(cls, limit: Limit) -> Counter:
        return cls(
            limit.metric, limit.window, limit.subject, limit.target, limit.subject == "end_user" and not limit.target
        )

    def __str__(self) -> str:
        return f"{_KINDS[self.metric]}:{self.window or ''}:{'each' if self.each else self.subject}:{self.target}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The limits that bear on one kind of request, while the same budget periods run."""

    limits: tuple[Limit, ...]
    packed: bytes
    """The limits as the script reads them."""
    counters: bytes
    """Names of the counters that a request is taken from; without its end user where each has one apart."""
    who: bytes
    """Project, key, route."""
    periods: tuple[Period | None, ...]
    """Of the limits, in their order; None for what is no budget."""
    until: datetime | None
    """When the first of the periods ends."""
    blank: Blank = field(default_factory=Blank, compare=False, repr=False)


@dataclass(slots=True)
class _Known:
    """Plans made for a principal, and what they were made from."""

    limits: tuple[Limit, ...]
    timezone: str
    named: frozenset[str]
    """End users with limits of their own."""
    plans: dict[tuple[str, str | bool], Plan] = field(default_factory=dict)


class Plans:
    """Keeps plans, by principal, route, and whether an end user is named (or which, if it has limits of its own)."""

    def __init__(self) -> None:
        self._known: dict[tuple[UUID, str], _Known] = {}

    def plan(self, principal: Principal, route: str, end_user: str | None, now: datetime) -> Plan:
        """Raises ZoneInfoNotFoundError for an unknown zone."""
        known = self._known.get((principal.tenant_id, principal.key_id))
        limits, timezone = principal.tenant_limits, principal.timezone
        if known is None or (known.limits is not limits and known.limits != limits) or known.timezone != timezone:
            if len(self._known) >= _MOST_PRINCIPALS:
                self._known.clear()
            named = frozenset(limit.target for limit in limits if limit.subject == "end_user" and limit.target)
            known = self._known[principal.tenant_id, principal.key_id] = _Known(limits, timezone, named)
        known.limits = limits  # the same object next time is the same limits without a look
        user: str | bool = end_user if end_user in known.named and end_user is not None else end_user is not None
        plan = known.plans.get((route, user))
        if plan is None or (plan.until is not None and (now >= plan.until or not _holds(plan, now))):
            if len(known.plans) >= _MOST_PLANS:
                known.plans.clear()
            plan = known.plans[route, user] = _make(principal, limits, timezone, route, end_user, now)
        return plan


def bears(limit: Limit, principal: Principal, route: str, end_user: str | None) -> bool:
    """Whether a limit of the tenant applies to a request of this principal."""
    match limit.subject:
        case "tenant":
            return True
        case "project":
            return limit.target == str(principal.project_id)
        case "key":
            return limit.target == principal.key_id
        case "model":
            return limit.target == route
        case "end_user":
            return end_user is not None and limit.target in ("", end_user)


def _holds(plan: Plan, now: datetime) -> bool:
    return all(period is None or period.holds(now) for period in plan.periods)


def _make(
    principal: Principal, limits: tuple[Limit, ...], timezone: str, route: str, end_user: str | None, now: datetime
) -> Plan:
    chosen = sorted(
        (limit for limit in limits if bears(limit, principal, route, end_user)),
        key=lambda limit: _ORDER.index(limit.metric),
    )
    periods = tuple(_period(limit, timezone, now) for limit in chosen)
    items: list[object] = []
    counters: list[str] = []
    for limit, period in zip(chosen, periods, strict=True):
        counter = str(Counter.of(limit))
        if counter != TENANT_SLOTS:
            counters.append(counter)
        first, second, watch = 0, 0, ""
        if period is not None:
            first, second = to_ms(period.start), to_ms(period.end)
            if limit.thresholds:
                watch = " ".join(map(str, (limit.amount, *limit.thresholds)))
        elif limit.metric != "concurrent":
            first = bucket_ms(str(limit.window))
        items += (counter, _KINDS[limit.metric], limit.amount, int(limit.hard), str(limit.id), first, second, watch)
    return Plan(
        limits=tuple(chosen),
        packed=_pack(items),
        counters=_pack(counters),
        who=_pack([str(principal.project_id), principal.key_id, route]),
        periods=periods,
        until=min((period.end for period in periods if period is not None), default=None),
    )


def _period(limit: Limit, timezone: str, now: datetime) -> Period | None:
    if limit.metric != "budget":
        return None
    return period_at(limit.window, timezone, now)  # type: ignore[arg-type]
