"""Counters and histograms that are told of with each request: as ``prometheus_client`` renders its own, whose locks and
checks take several times as long. One thread tells them, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counter(Collector):
    """Counts by the values of its labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str]) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, count: int, *labels: str) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Histogram(Collector):
    """Observations by the values of its labels. ``bounds``: of the buckets, inclusive, ascending."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._bounds = bounds
        self._named = [*map(floatToGoString, bounds), "+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._named)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for labels, counts in self._counts.items():
            until, buckets = 0, []
            for name, count in zip(self._named, counts, strict=True):
                until += count
                buckets.append((name, float(until)))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
