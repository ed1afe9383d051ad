from __future__ import annotations

from gateway.observability.backend_gauges import backend_gauges
from gateway.observability.metrics import Metrics
from tests.gateway.routing.support import Rig, endpoint


def test_what_routing_knows_of_backends_can_be_watched() -> None:
    a, b = endpoint("a"), endpoint("b")
    rig = Rig(a, b)
    metrics = Metrics()
    for gauge in backend_gauges(rig.balancer.snapshot):
        metrics.watch(gauge)
    rig.balancer.failed(a, unhealthy=True, unreachable=True)
    rig.balancer.failed(b, unhealthy=False, busy=True, retry_after_s=9)
    rig.balancer.adopt({}, {"b": 2}, replicas=3)
    with rig.balancer.using(b):
        told = metrics.render().decode()
    for line in (
        'penstock_backend_breaker{backend="a"} 2.0',
        'penstock_backend_breaker{backend="b"} 0.0',
        'penstock_backend_in_flight{backend="a"} 0.0',
        'penstock_backend_in_flight{backend="b"} 1.0',
        'penstock_backend_overruled{backend="b"} 1.0',
        'penstock_backend_set_aside_seconds{backend="b"} 9.0',
    ):
        assert line in told
    rig.clock.time += 600
    assert 'penstock_backend_breaker{backend="a"} 1.0' in metrics.render().decode()
