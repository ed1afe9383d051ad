from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from gateway.routing.policy import SET_ASIDE_S, Balancer
from gateway.routing.route import Endpoint

ENDPOINTS = [Endpoint(id, "pool", f"http://{id}", "m", 100) for id in ("a", "b", "c")]


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return self.time


def make(endpoints: list[Endpoint] | None = None) -> tuple[Balancer, HandClock]:
    clock = HandClock()
    alive = ENDPOINTS if endpoints is None else endpoints
    return Balancer(lambda pool: alive if pool == "pool" else [], clock), clock


def chosen(balancer: Balancer, *, tried: tuple[str, ...] = ()) -> str:
    endpoint = balancer.choose("pool", context_length=100, tried=tried)
    assert endpoint is not None
    return endpoint.id


def test_equals_take_turns() -> None:
    balancer, _ = make()
    assert Counter(chosen(balancer) for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_the_one_with_the_fewest_requests_comes_first() -> None:
    balancer, _ = make()
    with balancer.using(ENDPOINTS[0]), balancer.using(ENDPOINTS[0]), balancer.using(ENDPOINTS[1]):
        assert {chosen(balancer) for _ in range(6)} == {"c"}
        with balancer.using(ENDPOINTS[2]), balancer.using(ENDPOINTS[2]):
            assert {chosen(balancer) for _ in range(6)} == {"b"}
    assert {chosen(balancer) for _ in range(6)} == {"a", "b", "c"}


def test_those_tried_are_left_out() -> None:
    balancer, _ = make()
    assert {chosen(balancer, tried=("a", "c")) for _ in range(6)} == {"b"}
    assert balancer.choose("pool", context_length=100, tried=("a", "b", "c")) is None


def test_one_set_aside_comes_last_for_a_while() -> None:
    balancer, clock = make()
    balancer.set_aside(ENDPOINTS[0])
    assert {chosen(balancer) for _ in range(6)} == {"b", "c"}
    assert chosen(balancer, tried=("b", "c")) == "a"
    clock.time += SET_ASIDE_S + 0.1
    assert {chosen(balancer) for _ in range(6)} == {"a", "b", "c"}


def test_the_only_one_is_taken_even_if_set_aside() -> None:
    balancer, _ = make(ENDPOINTS[:1])
    balancer.set_aside(ENDPOINTS[0])
    assert chosen(balancer) == "a"


def test_an_empty_pool_has_none() -> None:
    balancer, _ = make([])
    assert balancer.choose("pool", context_length=100) is None
    assert balancer.context_length("pool") is None
    assert make()[0].choose("another", context_length=100) is None


def test_one_that_takes_more_than_was_reserved_for_is_left_out() -> None:
    longer = Endpoint("longer", "pool", "http://longer", "m", 200)
    balancer, _ = make([ENDPOINTS[0], longer])
    assert balancer.context_length("pool") == 200
    assert {chosen(balancer) for _ in range(6)} == {"a"}
    assert balancer.choose("pool", context_length=199, tried=("a",)) is None
    assert balancer.choose("pool", context_length=200, tried=("a",)) == longer
