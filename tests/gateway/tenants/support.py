"""Limits as tests write them, and who makes their changes."""

from __future__ import annotations

from uuid import UUID

from gateway.tenants.audit import Actor
from gateway.tenants.principal import BudgetPeriod, Limit
from gateway.tenants.specs import LimitSpec

ACTOR = Actor("cli:test")


def requests_per_minute(amount: int) -> LimitSpec:
    return LimitSpec(metric="requests", window="minute", amount=amount)


def concurrent(amount: int) -> LimitSpec:
    return LimitSpec(metric="concurrent", amount=amount)


def budget(nano_usd: int, period: BudgetPeriod = "month") -> LimitSpec:
    return LimitSpec(metric="budget", window=period, amount=nano_usd)


def shape(limits: tuple[Limit, ...]) -> set[tuple[object, ...]]:
    """What the limits say, without their ids."""
    return {(limit.subject, limit.target, limit.metric, limit.window, limit.amount) for limit in limits}


class Announcements:
    """Stands for Redis: hears of generations."""

    def __init__(self) -> None:
        self.heard: list[tuple[UUID, int]] = []

    async def __call__(self, tenant_id: UUID, generation: int) -> None:
        self.heard.append((tenant_id, generation))
