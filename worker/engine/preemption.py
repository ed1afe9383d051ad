"""Who gives up its blocks for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from worker.engine.fairness import Tenants
from worker.engine.request import Request

HYSTERESIS: Final = 2
"""A tenant that holds places already must hold so many times fewer than the other, for its weight, to take one more."""
MAX_DISPLACEMENTS: Final = 2
"""How often a request can lose its place to another tenant of its class: what is computed twice for the sake of
fairness is at most so many times what was asked for, and mostly found in the prefix cache."""


def last_in_order(requests: Iterable[Request]) -> Request | None:
    """The one to preempt when blocks run out: of the lowest class, then the most served tenant, then the newest."""
    return max(requests, key=_order, default=None)


def displaceable(running: Iterable[Request], newcomer: Request, tenants: Tenants, step: int) -> Request | None:
    """Who must make room for the first of the waiting, if there is no other; None: it has to wait.

    A higher class displaces a lower one. Within a class a tenant displaces another that was served no less and holds
    more places for its weight: so many more that afterwards its own, HYSTERESIS times, are no more than the other's
    (its first place: that they are no more). So tenants that share evenly leave each other alone, and nothing goes
    back and forth. Nobody is displaced who is in plan ``step`` already, or more than MAX_DISPLACEMENTS times.
    """
    if tenants.place_below(newcomer.priority):
        lower = (request for request in running if request.priority > newcomer.priority and request.last_step != step)
        if (victim := last_in_order(lower)) is not None:
            return victim
    victim = last_in_order(_over_served(running, newcomer, tenants, step))
    if victim is not None:
        victim.displaced += 1
    return victim


def _over_served(running: Iterable[Request], newcomer: Request, tenants: Tenants, step: int) -> Iterator[Request]:
    tenant = newcomer.tenant
    share = (HYSTERESIS if tenant.places else 1) * (tenant.places + 1) / tenant.weight
    over_served = {
        other
        for other in tenants.beside(tenant)
        if other.served >= tenant.served and (other.places - 1) / other.weight >= share
    }
    if not over_served:
        return iter(())
    return (
        request
        for request in running
        if request.tenant in over_served and request.displaced < MAX_DISPLACEMENTS and request.last_step != step
    )


def _order(request: Request) -> tuple[int, float, tuple[bool, int], int]:
    return request.order
