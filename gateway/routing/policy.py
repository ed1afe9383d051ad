"""Which backend first: the one with the fewest requests of this replica in flight; equals take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gateway.clock import Clock
from gateway.routing.route import Endpoint

SET_ASIDE_S = 2.0
"""How long an endpoint that could not be reached comes last."""


class Balancer:
    """Ranks a pool's endpoints. ``endpoints`` lists those alive, by pool."""

    def __init__(self, endpoints: Callable[[str], Sequence[Endpoint]], clock: Clock) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._in_flight: dict[str, int] = {}
        self._set_aside: dict[str, float] = {}
        self._turn = 0

    def context_length(self, pool: str) -> int | None:
        """The longest of the pool's endpoints; None if none is alive."""
        return max((endpoint.context_length for endpoint in self._endpoints(pool)), default=None)

    def choose(self, pool: str, *, context_length: int, tried: Sequence[str] = ()) -> Endpoint | None:
        """The best endpoint whose id is not among ``tried``. One set aside is taken only if there is no other.

        One that takes more tokens than ``context_length`` is left out: it could do more than was reserved for.
        """
        candidates = [
            endpoint
            for endpoint in self._endpoints(pool)
            if endpoint.id not in tried and endpoint.context_length <= context_length
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
            key=lambda endpoint: (self._set_aside.get(endpoint.id, 0.0) > now, self._in_flight.get(endpoint.id, 0)),
        )

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

    def set_aside(self, endpoint: Endpoint) -> None:
        now = self._clock.monotonic()
        self._set_aside = {id: until for id, until in self._set_aside.items() if until > now}
        self._set_aside[endpoint.id] = now + SET_ASIDE_S
