from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.series import Counter, Histogram

BOUNDS = (0.1, 0.25, 1, 5)
labels = st.sampled_from(["a", 'b\n\\"', "ü"])


def rendered(registry: CollectorRegistry) -> list[bytes]:
    """But for when each series began, which these do not tell."""
    return [line for line in generate_latest(registry).splitlines() if b"_created" not in line]


@given(st.lists(st.tuples(st.integers(0, 10**6), labels, labels)))
def test_a_counter_is_told_as_the_librarys_own(counted: list[tuple[int, str, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("x", "About it.", ("one", "other"))
    ours.register(counter)
    reference = prometheus_client.Counter("x", "About it.", ("one", "other"), registry=theirs)
    for count, *values in counted:
        counter.add(count, *values)
        reference.labels(*values).inc(count)
    assert rendered(ours) == rendered(theirs)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.25, 1.0, 1.5, 5.0, 5.1, 1e9]), labels)))
def test_a_histogram_is_told_as_the_librarys_own(observed: list[tuple[float, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x", "About it.", BOUNDS, ("one",))
    ours.register(histogram)
    reference = prometheus_client.Histogram("x", "About it.", ("one",), buckets=BOUNDS, registry=theirs)
    for value, label in observed:
        histogram.observe(value, label)
        reference.labels(label).observe(value)
    assert rendered(ours) == rendered(theirs)
