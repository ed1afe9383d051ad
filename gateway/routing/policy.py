"""Which backend first: the one with the fewest requests of this replica in flight; equals take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.apis import Api
from gateway.clock import Clock
from gateway.routing.retry_budget import RetryBudget
from gateway.routing.route import Endpoint, Target

SET_ASIDE_S = 2.0
"""How long an endpoint that could not be reached comes last."""


@dataclass(frozen=True, slots=True)
class Choice:
    endpoint: Endpoint
    model: str
    """The name by which it knows the model."""


class Balancer:
    """Ranks the endpoints of a route's targets. ``endpoints`` lists those of a pool that are alive."""

    def __init__(self, endpoints: Callable[[str], Sequence[Endpoint]], clock: Clock) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._in_flight: dict[str, int] = {}
        self._set_aside: dict[str, float] = {}
        self._budget = RetryBudget()
        self._turn = 0

    def context_length(self, targets: Sequence[Target], api: Api) -> int | None:
        """The longest of the endpoints that serve ``api``; None if none is alive."""
        return max(
            (
                endpoint.context_length
                for target in targets
                for endpoint in self._endpoints(target.pool)
                if api in endpoint.apis
            ),
            default=None,
        )

    def choose(
        self, targets: Sequence[Target], api: Api, *, context_length: int, tried: Sequence[str] = ()
    ) -> Choice | None:
        """The best endpoint whose id is not among ``tried``. One set aside is taken only if there is no other.

        One that takes more tokens than ``context_length`` is left out: it could do more than was reserved for.
        """
        candidates = [
            Choice(endpoint, endpoint.sends_model or target.backend_model)
            for target in targets
            for endpoint in self._endpoints(target.pool)
            if endpoint.id not in tried and endpoint.context_length <= context_length and api in endpoint.apis
        ]
        if not candidates:
            return None
        self._turn += 1
        if len(candidates) == 1:
            return candidates[0]
        now = self._clock.monotonic()
        start = self._turn % len(candidates)
        return min(
            candidates[start:] + candidates[:start],
            key=lambda choice: (
                self._set_aside.get(choice.endpoint.id, 0.0) > now,
                self._in_flight.get(choice.endpoint.id, 0),
            ),
        )

    def began(self) -> None:
        """A request is about to be sent for the first time."""
        self._budget.deposit()

    def may_retry(self) -> bool:
        """Whether the budget has another attempt; it is taken from it."""
        return self._budget.withdraw()

    @contextmanager
    def using(self, endpoint: Endpoint) -> Iterator[None]:
        """Counts one request in flight at ``endpoint``."""
        self._in_flight[endpoint.id] = self._in_flight.get(endpoint.id, 0) + 1
        try:
            yield
        finally:
            left = self._in_flight[endpoint.id] - 1
            if left:
                self._in_flight[endpoint.id] = left
            else:
                del self._in_flight[endpoint.id]

    def succeeded(self, endpoint: Endpoint) -> None:
        """It gave a whole answer."""

    def failed(
        self, endpoint: Endpoint, *, unhealthy: bool, unreachable: bool = False, retry_after_s: float | None = None
    ) -> None:
        """``unhealthy``: it was the endpoint's fault. ``retry_after_s``: so long it wants to be left alone."""
        if unreachable:
            now = self._clock.monotonic()
            self._set_aside = {id: until for id, until in self._set_aside.items() if until > now}
            self._set_aside[endpoint.id] = now + SET_ASIDE_S
