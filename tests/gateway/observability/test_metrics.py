from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.billing.usage import TokenUsage
from gateway.observability.metrics import Gauge, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and the values of the labels, in the order of their names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_a_settled_request_is_counted_by_route_api_and_status() -> None:
    metrics = Metrics()
    usage = TokenUsage(10, 4, cached_tokens=3)
    for _ in range(2):
        metrics.settled("small", "messages", "ok", usage, charged_nano_usd=7, total_s=0.3, first_token_ms=30)
    metrics.settled(
        "small", "chat_completions", "failed", TokenUsage(), charged_nano_usd=0, total_s=0.1, first_token_ms=None
    )
    found = samples(metrics)
    assert found["penstock_requests_total", ("messages", "small", "ok")] == 2
    assert found["penstock_requests_total", ("chat_completions", "small", "failed")] == 1
    assert found["penstock_tokens_total", ("prompt", "small")] == 20
    assert found["penstock_tokens_total", ("completion", "small")] == 8
    assert found["penstock_tokens_total", ("cached", "small")] == 6
    assert found["penstock_charged_nano_usd_total", ("small",)] == 14
    assert found["penstock_first_token_seconds_count", ("small",)] == 2
    assert found["penstock_request_seconds_bucket", ("0.5", "small", "ok")] == 2


def test_refusals_and_attempts_are_counted_by_code() -> None:
    metrics = Metrics()
    metrics.refused("rate_limit_exceeded")
    metrics.refused(None)
    metrics.attempted("gpu-1", None)
    metrics.attempted("gpu-1", "backend_timeout")
    found = samples(metrics)
    assert found["penstock_refusals_total", ("rate_limit_exceeded",)] == 1
    assert found["penstock_refusals_total", ("invalid_request",)] == 1
    assert found["penstock_backend_attempts_total", ("gpu-1", "ok")] == 1
    assert found["penstock_backend_attempts_total", ("gpu-1", "backend_timeout")] == 1


def test_gauges_are_read_when_they_are_asked_for() -> None:
    metrics, open_requests = Metrics(), {"a": 1.0}
    metrics.watch(
        Gauge("backend_in_flight", "…", ("backend",), lambda: [((name,), n) for name, n in open_requests.items()])
    )
    open_requests["a"] = 5.0
    assert samples(metrics)["penstock_backend_in_flight", ("a",)] == 5


def test_two_gateways_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.refused("x")
    assert ("penstock_refusals_total", ("x",)) not in samples(second)
