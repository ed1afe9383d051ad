"""What is scraped parses, and agrees with what happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from worker.engine.messages import EngineInfo, EngineOutput, EngineStats
from worker.server.metrics import Metrics

INFO = EngineInfo(
    max_model_len=128,
    num_blocks=9,
    block_size=16,
    vocab_size=10,
    eos_token_ids=[0],
    device="toy",
    model_fingerprint="ab12",
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(**stats: Any) -> tuple[Metrics, Clock, Any]:
    clock = Clock()
    engine: Any = SimpleNamespace(info=INFO, stats=EngineStats(**stats), sleep_level=0)
    return Metrics(engine, 'the "model"', clock=clock), clock, engine


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and, but for the model's, its labels."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == 'the "model"'
            inner = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            key = sample.name + (f"{{{inner}}}" if inner else "")
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_the_engines_numbers_are_told_as_they_are() -> None:
    metrics, _, engine = made(
        running=3,
        waiting=4,
        kv_usage=0.25,
        steps=10,
        preemptions=2,
        step_us=1_500_000,
        overhead_us=250_000,
        computed_tokens=77,
        cache_queries=50,
        cache_hits=32,
        host_hits=16,
        cached_blocks=5,
        waiting_for_kv=1,
    )
    samples = scraped(metrics)
    expected = {
        "penstock_num_requests_running": 3,
        "penstock_num_requests_waiting": 4,
        "penstock_num_requests_waiting_for_kv": 1,
        "penstock_kv_cache_usage_ratio": 0.25,
        "penstock_kv_cache_blocks": 8,
        "penstock_kv_cache_cached_blocks": 5,
        "penstock_num_preemptions_total": 2,
        "penstock_prefix_cache_queries_total": 50,
        "penstock_prefix_cache_hits_total": 32,
        "penstock_prefix_cache_host_hits_total": 16,
        "penstock_engine_computed_tokens_total": 77,
        "penstock_engine_overhead_seconds_total": 0.25,
        "penstock_engine_step_seconds_count": 10,
        "penstock_engine_step_seconds_sum": 1.5,
        "penstock_engine_sleep_level": 0,
    }
    assert {name: samples[name] for name in expected} == expected
    (build,) = (name for name in samples if name.startswith("penstock_build_info"))
    assert "block_size=16" in build
    assert "model_fingerprint=ab12" in build
    engine.stats, engine.sleep_level = EngineStats(running=1), 2
    later = scraped(metrics)
    assert (later["penstock_num_requests_running"], later["penstock_engine_sleep_level"]) == (1, 2)


def test_one_request_is_counted_once_and_timed() -> None:
    metrics, clock, _ = made()
    request = metrics.request("chat")
    clock.now += 0.2
    request.output(EngineOutput("a", [], prefilled=8, cached_tokens=16, queued_us=30_000, compute_us=400_000))
    clock.now += 0.2
    request.output(EngineOutput("a", [5], compute_us=100_000))
    clock.now += 0.027
    request.output(EngineOutput("a", [6, 7, 8], compute_us=0))  # a slow reader: three steps in one
    clock.now += 0.02
    request.output(EngineOutput("a", [9], "stop"))
    request.end("ok", "stop", 20, 5)
    request.end("failed", None, 20, 5)
    samples = scraped(metrics)
    assert samples["penstock_requests_total{endpoint=chat,finish_reason=stop,outcome=ok}"] == 1
    assert sum(value for name, value in samples.items() if name.startswith("penstock_requests_total")) == 1
    assert samples["penstock_prompt_tokens_total"] == 20
    assert samples["penstock_prompt_tokens_cached_total"] == 16
    assert samples["penstock_generation_tokens_total"] == 5
    assert samples["penstock_compute_seconds_total"] == 0.5
    assert samples["penstock_time_to_first_token_seconds_count"] == 1
    assert round(samples["penstock_time_to_first_token_seconds_sum"], 6) == 0.4
    assert samples["penstock_inter_token_latency_seconds_count"] == 4
    assert round(samples["penstock_inter_token_latency_seconds_sum"], 6) == 0.047
    assert samples["penstock_inter_token_latency_seconds_bucket{le=0.01}"] == 3
    assert samples["penstock_request_queue_time_seconds_sum"] == 0.03
    assert round(samples["penstock_e2e_request_latency_seconds_sum"], 6) == 0.447
    assert samples["penstock_request_prompt_tokens_sum"] == 20
    assert samples["penstock_request_generation_tokens_sum"] == 5


def test_choices_are_one_request_with_one_first_token_and_gaps_of_their_own() -> None:
    metrics, clock, _ = made()
    request = metrics.request("completions")
    request.output(EngineOutput("a", [], prefilled=4, cached_tokens=0, queued_us=0))
    request.output(EngineOutput("b", [], prefilled=4, cached_tokens=16, queued_us=0))
    clock.now += 1
    request.output(EngineOutput("a", [1]))
    clock.now += 1
    request.output(EngineOutput("b", [1]))
    clock.now += 1
    request.output(EngineOutput("a", [2], "length"))
    request.output(EngineOutput("b", [2], "length"))
    request.end("ok", "length", 8, 4)
    samples = scraped(metrics)
    assert samples["penstock_time_to_first_token_seconds_count"] == 1
    assert samples["penstock_time_to_first_token_seconds_sum"] == 1
    assert samples["penstock_inter_token_latency_seconds_count"] == 2
    assert samples["penstock_inter_token_latency_seconds_sum"] == 3
    assert samples["penstock_request_queue_time_seconds_count"] == 2
    assert samples["penstock_prompt_tokens_cached_total"] == 0


def test_what_did_not_go_well_is_told_apart_and_times_nothing() -> None:
    metrics, _, _ = made()
    refused = metrics.request("chat")
    refused.end("refused", None, 0, 0)
    failed = metrics.request("chat")
    failed.output(EngineOutput("a", [1]))
    failed.end("failed", None, 9, 1)
    metrics.request("embeddings").end("aborted", None, 0, 0)
    samples = scraped(metrics)
    for endpoint, outcome in (("chat", "refused"), ("chat", "failed"), ("embeddings", "aborted")):
        assert samples[f"penstock_requests_total{{endpoint={endpoint},finish_reason=,outcome={outcome}}}"] == 1
    assert samples["penstock_prompt_tokens_total"] == 9
    assert samples["penstock_e2e_request_latency_seconds_count"] == 0
    assert samples["penstock_request_prompt_tokens_count"] == 0


def test_tokens_that_no_usage_counts_are_not_counted() -> None:
    metrics, _, _ = made()
    muted = metrics.request("completions")
    muted.output(EngineOutput("a", [7], "length"), 0)
    stopped = metrics.request("chat")
    stopped.output(EngineOutput("b", [1, 2, 3]), 2)
    samples = scraped(metrics)
    assert samples["penstock_generation_tokens_total"] == 2
    assert samples["penstock_time_to_first_token_seconds_count"] == 1


def test_two_workers_in_one_process_do_not_share_their_numbers() -> None:
    first, _, _ = made()
    second, _, _ = made()
    first.request("chat").end("refused", None, 0, 0)
    assert "penstock_requests_total{endpoint=chat,finish_reason=,outcome=refused}" in scraped(first)
    assert "penstock_requests_total{endpoint=chat,finish_reason=,outcome=refused}" not in scraped(second)
