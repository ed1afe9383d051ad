"""How many second attempts a gateway may make: a share of its requests, so that retries never become the load."""

from __future__ import annotations

RATIO = 0.2
"""Second attempts for each request, in the long run."""
RESERVE = 10.0
"""And so many more, for a gateway with few requests."""


class RetryBudget:
    """A token bucket that requests fill and retries empty."""

    def __init__(self, *, ratio: float = RATIO, reserve: float = RESERVE) -> None:
        self._ratio = ratio
        self._most = reserve
        self._tokens = reserve

    def deposit(self) -> None:
        self._tokens = min(self._most, self._tokens + self._ratio)

    def withdraw(self) -> bool:
        """Whether one more attempt may be made."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
