"""Prometheus metrics of one replica.

Labels are names that operators gave (routes, backends) and fixed words: never a tenant's, whose number has no bound,
and never what a client sent. Amounts of money are counted in integer nano-USD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.apis import Api
from gateway.billing.usage import Status, TokenUsage
from gateway.observability.series import Counter, Histogram

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_WAITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
"""Seconds to a first token."""
_WHOLES: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
"""Seconds from admission to end."""

_CACHE: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "lookups": ("Look-ups of kept answers.", ("outcome", "tier")),
    "bypassed": ("Requests that the cache cannot answer, by why.", ("reason",)),
    "rejected": ("Answers of near meaning that were not given, by the guard that objected.", ("guard",)),
    "kept": ("Answers to be kept: `kept`, or why not.", ("outcome",)),
    "agreement": ("Semantic hits that were asked of the model all the same.", ("agreed",)),
    "evicted": ("Answers that made room for others of their tenant.", ()),
    "faults": ("What kept the cache from its work, by part.", ("part",)),
    "followed": ("Requests that waited for the answer of an identical one.", ("outcome",)),
}


@dataclass(frozen=True, slots=True)
class Gauge:
    """Something that is read when it is asked for: values by their labels."""

    name: str
    about: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Metrics:
    """One for the whole gateway. Recording takes microseconds and never raises for what a backend sends."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that were settled.", "route", "api", "status")
        self._refusals = self._counter("refusals", "Requests that were not admitted, by error code.", "code")
        self._tokens = self._counter("tokens", "Tokens of settled requests.", "route", "kind")
        self._charged = self._counter("charged_nano_usd", "What tenants were charged.", "route")
        self._attempts = self._counter(
            "backend_attempts",
            "Attempts at backends: `ok`, an error code of ours, or the status of an error in its own words.",
            "backend",
            "outcome",
        )
        self._responses = self._counter("responses", "Responses to be kept: `stored`, or why not.", "outcome")
        self._first_token = self._histogram("first_token_seconds", "From admission to first token.", _WAITS, "route")
        self._duration = self._histogram("request_seconds", "From admission to the end.", _WHOLES, "route", "status")
        self._cache = {
            name: self._counter(f"answer_cache_{name}", about, *labels) for name, (about, labels) in _CACHE.items()
        }
        self._log_lost = self._counter("prompt_log_lost", "Requests that were to be logged and were not.", "reason")
        self._gauges = _Gauges()
        self._registry.register(self._gauges)
        self.watch(
            Gauge("build_info", "Constant 1; the version.", ("version",), lambda: [((version("penstock"),), 1.0)])
        )

    def settled(
        self,
        route: str,
        api: Api,
        status: Status,
        usage: TokenUsage,
        *,
        charged_nano_usd: int,
        total_s: float,
        first_token_ms: int | None,
    ) -> None:
        self._requests.add(1, route, api, status)
        self._duration.observe(total_s, route, status)
        if first_token_ms is not None:
            self._first_token.observe(first_token_ms / 1000, route)
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("completion", usage.completion_tokens),
            ("cached", usage.cached_tokens),
        ):
            if count:
                self._tokens.add(count, route, kind)
        if charged_nano_usd:
            self._charged.add(charged_nano_usd, route)

    def refused(self, code: str | None) -> None:
        """A request that was answered with an error of our own before it was admitted."""
        self._refusals.add(1, code or "invalid_request")

    def attempted(self, backend: str, error_code: str | None) -> None:
        """An attempt at a backend ended. None: well, or by the client's leaving."""
        self._attempts.add(1, backend, error_code or "ok")

    def kept(self, outcome: str) -> None:
        """A response was to be kept: ``stored``, or why it was not."""
        self._responses.add(1, outcome)

    def count(self, name: str, labels: Mapping[str, str], amount: int = 1) -> None:
        """What the answer cache did; see ``gateway.cache.parts.Counter``."""
        self._cache[name].add(amount, *(labels[label] for label in _CACHE[name][1]))

    def log_lost(self, reason: str, count: int) -> None:
        """Requests that the prompt log should have, and has not."""
        self._log_lost.add(count, reason)

    def watch(self, gauge: Gauge) -> None:
        self._gauges.watched.append(gauge)

    def render(self) -> bytes:
        """In Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(f"penstock_{name}", about, labels)
        self._registry.register(counter)
        return counter

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        histogram = Histogram(f"penstock_{name}", about, bounds, labels)
        self._registry.register(histogram)
        return histogram


class _Gauges(Collector):
    def __init__(self) -> None:
        self.watched: list[Gauge] = []

    def collect(self) -> Iterator[Metric]:
        for gauge in self.watched:
            family = GaugeMetricFamily(f"penstock_{gauge.name}", gauge.about, labels=gauge.labels)
            for labels, value in gauge.read():
                family.add_metric(labels, value)
            yield family
