"""Prometheus metrics of one worker. The names follow vLLM's where the meaning is the same, with our own prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from worker.engine.messages import EngineOutput, EngineStats

if TYPE_CHECKING:
    from worker.engine.client import EngineClient

Outcome = Literal["ok", "aborted", "failed", "refused"]
"""``aborted``: the client left; ``refused``: an answer below 500; ``failed``: 500 and above, or an error event."""

_WAITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
"""Seconds, for waits from one fast step to a long queue."""
_GAPS: Final = (0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
"""Seconds between tokens."""
_WHOLES: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
"""Seconds from arrival to end."""
_LENGTHS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Tokens."""
_LABEL: Final = "model_name"

_GAUGES: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("num_requests_running", "Requests in the engine's steps.", lambda stats: stats.running),
    ("num_requests_waiting", "Requests that wait for a step.", lambda stats: stats.waiting),
    (
        "num_requests_waiting_for_kv",
        "Those of the waiting whose KV blocks are on their way from another tier.",
        lambda stats: stats.waiting_for_kv,
    ),
    ("kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1, without the cached.", lambda stats: stats.kv_usage),
    ("kv_cache_cached_blocks", "KV blocks that are free and still hold a named content.", lambda s: s.cached_blocks),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("num_preemptions", "Requests set back for want of KV blocks or for fairness.", lambda stats: stats.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache, in any tier.", lambda stats: stats.cache_hits),
    ("prefix_cache_host_hits", "Those of them that the host tier held.", lambda stats: stats.host_hits),
    ("engine_computed_tokens", "Tokens that went through the model.", lambda stats: stats.computed_tokens),
    (
        "engine_overhead_seconds",
        "Step time that is no request's: recomputation, last steps of aborted requests.",
        lambda stats: stats.overhead_us / 1e6,
    ),
)


class _EngineCollector(Collector):
    """Reads the engine's own numbers when it is asked; nothing is kept twice."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats, info = self._engine.stats, self._engine.info
        for name, help_text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_{name}", help_text, labels=[_LABEL])
            gauge.add_metric([self._model], read(stats))
            yield gauge
        for name, help_text, read in _COUNTERS:
            counter = CounterMetricFamily(f"penstock_{name}", help_text, labels=[_LABEL])
            counter.add_metric([self._model], read(stats))
            yield counter
        steps = SummaryMetricFamily(
            "penstock_engine_step_seconds", "Steps and the time of all of them.", labels=[_LABEL]
        )
        steps.add_metric([self._model], stats.steps, stats.step_us / 1e6)
        yield steps
        asleep = GaugeMetricFamily(
            "penstock_engine_sleep_level", "0: awake; 1: weights on the host; 2: weights dropped.", labels=[_LABEL]
        )
        asleep.add_metric([self._model], self._engine.sleep_level)
        yield asleep
        blocks = GaugeMetricFamily("penstock_kv_cache_blocks", "KV blocks that can be held.", labels=[_LABEL])
        blocks.add_metric([self._model], info.num_blocks - 1)
        yield blocks
        build = GaugeMetricFamily(
            "penstock_build_info",
            "Always 1; the labels tell what runs here.",
            labels=[_LABEL, "version", "device", "block_size", "max_model_len", "model_fingerprint"],
        )
        build.add_metric(
            [
                self._model,
                version("penstock"),
                info.device,
                str(info.block_size),
                str(info.max_model_len),
                info.model_fingerprint,
            ],
            1,
        )
        yield build


class Metrics:
    """What one worker counts. Each instance has a registry of its own, so several can live in one process.

    Engine numbers are those after its latest step. Counters of requests and tokens move as outputs are read.
    """

    def __init__(self, engine: EngineClient, model: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``model``: the served name, label ``model_name`` of every series. ``clock``: seconds."""
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"penstock_{name}", help_text, [_LABEL], registry=self._registry, buckets=buckets)
            return family.labels(model)

        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"penstock_{name}", help_text, [_LABEL], registry=self._registry).labels(model)

        self._model = model
        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _WAITS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Between two tokens of one choice; those that came together share.", _GAPS
        )
        self._queued = histogram("request_queue_time_seconds", "From a choice's arrival to its first step.", _WAITS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to end, where all went well.", _WHOLES)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS)
        self._output_length = histogram("request_generation_tokens", "Tokens in a request's answer.", _LENGTHS)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that the engine worked on.")
        self._cached_tokens = counter("prompt_tokens_cached", "Those of them that the prefix cache held.")
        self._generated_tokens = counter("generation_tokens", "Tokens generated.")
        self._compute = counter("compute_seconds", "Device seconds times ranks that were requests' own.")
        self._requests = Counter(
            "penstock_requests",
            "Requests that have ended; finish_reason is empty where there was none.",
            [_LABEL, "endpoint", "outcome", "finish_reason"],
            registry=self._registry,
        )

    def request(self, endpoint: str) -> RequestMetrics:
        """Call at arrival. ``endpoint``: one of a few fixed names (``chat``, ``embeddings``), no caller's text."""
        return RequestMetrics(self, endpoint)

    def render(self) -> tuple[bytes, str]:
        """Body in Prometheus' text format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class RequestMetrics:
    """One request's part, with all its choices."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived = metrics._clock()
        self._latest: dict[str, float] = {}
        """By choice: when its latest token came."""
        self._worked_on = False
        self._cached_counted = False
        self._ended = False

    def output(self, output: EngineOutput, generated: int | None = None) -> None:
        """Call for every output of every choice, when it is read.

        ``generated``: how many of its tokens the usage counts: none behind a stop string; None: all.
        """
        metrics = self._metrics
        self._worked_on = True
        if output.queued_us is not None:
            metrics._queued.observe(output.queued_us / 1e6)
        if output.cached_tokens is not None and not self._cached_counted:
            # Once a request, as its usage tells it: further choices find the first one's prompt.
            self._cached_counted = True
            metrics._cached_tokens.inc(output.cached_tokens)
        if output.compute_us:
            metrics._compute.inc(output.compute_us / 1e6)
        count = len(output.token_ids) if generated is None else generated
        if not count:
            return
        now = metrics._clock()
        metrics._generated_tokens.inc(count)
        latest = self._latest.get(output.request_id)
        if latest is not None:
            for _ in range(count):
                metrics._between_tokens.observe((now - latest) / count)
        elif not self._latest:
            metrics._first_token.observe(now - self._arrived)
        self._latest[output.request_id] = now

    def end(self, outcome: Outcome, finish_reason: str | None, prompt_tokens: int, completion_tokens: int) -> None:
        """Call when the answer is over, however; only the first call counts.

        ``prompt_tokens`` and ``completion_tokens`` are those of the usage, whether it was sent or not.
        """
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics._requests.labels(metrics._model, self._endpoint, outcome, finish_reason or "").inc()
        if self._worked_on:
            metrics._prompt_tokens.inc(prompt_tokens)
        if outcome == "ok":
            metrics._whole.observe(metrics._clock() - self._arrived)
            metrics._prompt_length.observe(prompt_tokens)
            metrics._output_length.observe(completion_tokens)
