"""How many further attempts a gateway may make: a share of its requests, so that retries never become the load.

Each route has a budget of its own: one whose backends are all down must not use up what another needs for a moment.
"""

from __future__ import annotations

import math

from gateway.clock import Clock

RATIO = 0.2
"""Further attempts for each request, in the long run."""
RESERVE = 20.0
"""So many at once whatever the traffic, for a route with few requests."""
RESERVE_PER_S = 1.0
"""How quickly the reserve fills again without requests."""
MEMORY_S = 10.0
"""What busy times earned beyond the reserve fades with this time constant: a burst may cost what about so many seconds
earned."""

TIDY_ABOVE = 1000
"""Of more routes, budgets that are as new are forgotten."""


class RetryBudgets:
    """By route."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._budgets: dict[str, RetryBudget] = {}

    def of(self, route: str) -> RetryBudget:
        budget = self._budgets.get(route)
        if budget is None:
            if len(self._budgets) >= TIDY_ABOVE:
                self._budgets = {name: each for name, each in self._budgets.items() if not each.as_new()}
            budget = self._budgets[route] = RetryBudget(self._clock)
        return budget


class RetryBudget:
    """A bucket that requests and time fill and retries empty."""

    def __init__(self, clock: Clock, *, ratio: float = RATIO, reserve: float = RESERVE) -> None:
        self._clock = clock
        self._ratio = ratio
        self._reserve = reserve
        self._tokens = reserve
        self._as_of = clock.monotonic()

    def deposit(self) -> None:
        self._bring_up_to_date()
        self._tokens += self._ratio

    def withdraw(self) -> bool:
        """Whether one more attempt may be made."""
        self._bring_up_to_date()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def as_new(self) -> bool:
        self._bring_up_to_date()
        return abs(self._tokens - self._reserve) < 1

    def _bring_up_to_date(self) -> None:
        now = self._clock.monotonic()
        passed, self._as_of = now - self._as_of, now
        over = self._tokens - self._reserve
        if over > 0:
            self._tokens = self._reserve + over * math.exp(-passed / MEMORY_S)
        else:
            self._tokens = min(self._reserve, self._tokens + passed * RESERVE_PER_S)
