"""How tenants of one class share the engine: a virtual token counter for each (Sheng et al., OSDI 2024).

A tenant's counter grows by what its requests were given, divided by its weight; who has the least goes first. A tenant
that had nothing open is lifted to the least counter among those that have: idleness is not saved up. Within a class,
two tenants that always have requests waiting are served alike up to ``2 * max(INPUT_CHARGE * longest prompt,
OUTPUT_CHARGE * tokens of all running requests)`` (the paper's theorem 4.4), whatever they send.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

INPUT_CHARGE: Final = 1.0
"""For a prompt token that was computed. What the cache held costs nothing, nor does recomputing after preemption."""
OUTPUT_CHARGE: Final = 2.0
"""For a drawn token; the paper's ratio."""


class Tenant:
    """What one tenant was given within one class."""

    __slots__ = ("draw_charge", "name", "num_open", "places", "priority", "rank", "served", "token_charge", "weight")

    def __init__(self, name: str, priority: int) -> None:
        self.name = name
        self.priority = priority
        self.served = 0.0
        """The counter."""
        self.rank = (False, 0)
        """Breaks ties between counters: who was given nothing since it came goes first, or a newcomer would wait for
        all that waits; of several such, who came first."""
        self.places = 0
        """Requests that hold blocks."""
        self.num_open = 0
        self.weight = 1.0
        self.token_charge = INPUT_CHARGE
        self.draw_charge = OUTPUT_CHARGE

    def charge_prompt(self, num_tokens: int) -> None:
        """So many tokens of a prompt are in the next step."""
        self.served += num_tokens * self.token_charge
        self.rank = (True, self.rank[1])


class Tenants:
    """The tenants that have requests open, and the counters of those whose debt is not forgiven yet, by class."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Tenant]] = {}
        self._entered = 0

    def enter(self, priority: int, name: str, weight: float) -> Tenant:
        """One more request of a tenant; ``weight`` holds for all of its requests from now on."""
        known = self._classes.setdefault(priority, {})
        tenant = known.get(name)
        if tenant is None:
            tenant = known[name] = Tenant(name, priority)
        if not tenant.num_open:
            least = min((other.served for other in known.values() if other.num_open), default=0.0)
            tenant.served = max(tenant.served, least)
            self._entered += 1
            tenant.rank = (False, self._entered)
        tenant.num_open += 1
        tenant.weight = weight
        tenant.token_charge = INPUT_CHARGE / weight
        tenant.draw_charge = OUTPUT_CHARGE / weight
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One request less. A class in which nothing is open begins anew: nobody is owed anything."""
        tenant.num_open -= 1
        if tenant.num_open:
            return
        known = self._classes[tenant.priority]
        least = min((other.served for other in known.values() if other.num_open), default=None)
        if least is None:
            del self._classes[tenant.priority]
        else:
            # Whoever is not ahead of the least would be lifted anyway when it came back.
            self._classes[tenant.priority] = {
                name: other for name, other in known.items() if other.num_open or other.served > least
            }

    def beside(self, tenant: Tenant) -> Iterator[Tenant]:
        """The other tenants of the class that hold places."""
        return (other for other in self._classes[tenant.priority].values() if other.places and other is not tenant)

    def place_below(self, priority: int) -> bool:
        """Whether a request of a lower class (a greater number) holds a place."""
        return any(
            tenant.places for number, known in self._classes.items() if number > priority for tenant in known.values()
        )
