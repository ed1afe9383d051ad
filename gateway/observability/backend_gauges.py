"""What this replica holds of each backend, as gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.observability.metrics import Gauge
from gateway.routing.breaker import BreakerState
from gateway.routing.standing import Health

_LEVELS: Final[dict[BreakerState, int]] = {"closed": 0, "half_open": 1, "open": 2}


def backend_gauges(snapshot: Callable[[], Sequence[Health]]) -> list[Gauge]:
    """``snapshot``: of ``gateway.routing.policy.Balancer``."""

    def gauge(name: str, about: str, value: Callable[[Health], float]) -> Gauge:
        def read() -> Iterable[tuple[tuple[str, ...], float]]:
            return [((health.endpoint,), value(health)) for health in snapshot()]

        return Gauge(f"backend_{name}", about, ("backend",), read)

    return [
        gauge("in_flight", "Requests of this gateway that are there.", lambda health: health.in_flight),
        gauge(
            "breaker",
            "0: closed. 1: half-open, a trial is due. 2: open, requests go elsewhere.",
            lambda health: _LEVELS[health.breaker],
        ),
        gauge("overruled", "1: most gateways hold it for dead.", lambda health: health.overruled),
        gauge("set_aside_seconds", "So much longer it is left alone, being busy.", lambda health: health.set_aside_s),
    ]
