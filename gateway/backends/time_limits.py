"""How long a backend may take, and for what."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.routing.route import Endpoint


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds. Beside them the route has a limit for the whole request, which holds in every phase of every attempt."""

    connect_s: float
    """For a connection."""
    first_byte_s: float
    """From the beginning of an attempt to the first that tells of an answer: an event, running usage, or the first
    bytes of a JSON body. Comments by which servers say that a request waits in their queue do not lengthen it: as far
    as the client is concerned, nothing came yet, and another backend may do better. Nor do the bytes of an event that
    does not end."""
    idle_s: float
    """From then on, between any bytes, comments included: whoever sends them lives."""

    def of(self, endpoint: Endpoint) -> TimeLimits:
        """These, but for what ``endpoint`` has of its own."""
        if endpoint.connect_timeout_s is endpoint.first_byte_timeout_s is endpoint.idle_timeout_s is None:
            return self
        return TimeLimits(
            self.connect_s if endpoint.connect_timeout_s is None else endpoint.connect_timeout_s,
            self.first_byte_s if endpoint.first_byte_timeout_s is None else endpoint.first_byte_timeout_s,
            self.idle_s if endpoint.idle_timeout_s is None else endpoint.idle_timeout_s,
        )
