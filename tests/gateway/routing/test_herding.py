"""Replicas that know each other's load late: do they herd? Simulated, without a network and without waiting."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from gateway.routing.load import EVERY_S
from gateway.routing.policy import Balancer
from gateway.routing.route import Endpoint, Target
from gateway.routing.standing import Standing
from tests.gateway.routing.support import HandClock, endpoint

REPLICAS = 8
TARGETS = (Target("pool", "m"),)


class LeastLoaded(Balancer):
    """Goes where the sum of what is known is least."""

    def _less_loaded(self, group: list[tuple[Endpoint, Standing]]) -> Endpoint:
        return min(group, key=lambda each: (each[1].in_flight + each[1].elsewhere, self._random.random()))[0]


class Blind(Balancer):
    """Knows nothing of others, nor of itself."""

    def _less_loaded(self, group: list[tuple[Endpoint, Standing]]) -> Endpoint:
        return self._random.choice(group)[0]


def imbalance(
    kind: type[Balancer], *, backends: int, rate: float, service_s: float, at_first: float = 0.0, slow: float = 1.0
) -> float:
    """The mean over time of the busiest backend's requests, as a multiple of the average backend's.

    ``rate``: requests a second altogether. ``at_first``: share of them that comes to the first replica, beside its own.
    ``slow``: by how much longer the first backend takes.
    """
    random, clock = Random(7), HandClock()
    pool = [endpoint(f"b{number}") for number in range(backends)]
    replicas = [kind(lambda _: pool, clock, random=Random(number)) for number in range(REPLICAS)]
    told: list[dict[str, int]] = [{} for _ in replicas]
    there: Counter[str] = Counter()
    looks: list[float] = []
    order = count()
    queue: list[tuple[float, int, Iterator[float]]] = []

    def arrivals() -> Iterator[float]:
        while True:
            yield random.expovariate(rate)
            replica = replicas[0 if random.random() < at_first else random.randrange(REPLICAS)]
            choice = replica.choose(TARGETS, "chat_completions", context_length=100)
            assert choice is not None
            begin(request(replica, choice.endpoint))

    def request(replica: Balancer, chosen: Endpoint) -> Iterator[float]:
        with replica.using(chosen):
            there[chosen.id] += 1
            yield random.expovariate(1 / service_s) * (slow if chosen is pool[0] else 1.0)
            there[chosen.id] -= 1

    def exchange(number: int) -> Iterator[float]:
        yield EVERY_S * number / REPLICAS
        while True:
            told[number] = replicas[number].in_flight()
            others: Counter[str] = Counter()
            for other, loads in enumerate(told):
                if other != number:
                    others.update(loads)
            replicas[number].adopt(others, {}, replicas=REPLICAS)
            yield EVERY_S

    def watch() -> Iterator[float]:
        yield 2.0
        while True:
            looks.append(max(there.values()) * backends / max(1, there.total()))
            yield 0.02

    def begin(process: Iterator[float]) -> None:
        wait = next(process, None)
        if wait is not None:
            heapq.heappush(queue, (clock.time + wait, next(order), process))

    begin(arrivals())
    begin(watch())
    for number in range(REPLICAS):
        begin(exchange(number))
    end = clock.time + 6.0
    while queue[0][0] < end:
        clock.time, _, process = heapq.heappop(queue)
        begin(process)
    return sum(looks) / len(looks)


CASES: list[dict[str, Any]] = [
    {"backends": 4, "rate": 400, "service_s": 1.0},
    {"backends": 4, "rate": 800, "service_s": 0.1},
    {"backends": 2, "rate": 400, "service_s": 1.0},
    {"backends": 2, "rate": 800, "service_s": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_known_late_makes_no_herd(case: dict[str, Any]) -> None:
    found = {kind: imbalance(kind, **case) for kind in (Balancer, LeastLoaded, Blind)}
    assert found[Balancer] < 1.25
    assert found[Balancer] - 1 < 0.5 * (found[LeastLoaded] - 1)
    assert found[Balancer] < found[Blind]


@pytest.mark.parametrize("case", [{"at_first": 0.95}, {"slow": 4.0}, {"at_first": 0.95, "slow": 4.0}], ids=str)
def test_nor_do_uneven_replicas_or_backends(case: dict[str, Any]) -> None:
    found = {kind: imbalance(kind, backends=4, rate=400, service_s=1.0, **case) for kind in (Balancer, Blind)}
    assert found[Balancer] < 1.15
    assert found[Balancer] < found[Blind]
