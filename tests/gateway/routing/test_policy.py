from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from gateway.routing.policy import SET_ASIDE_S, Balancer
from gateway.routing.route import Endpoint

ENDPOINTS = [Endpoint(id, "pool", f"http://{id}", "m") for id in ("a", "b", "c")]


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
    endpoint = balancer.choose("pool", tried=tried)
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
    assert balancer.choose("pool", tried=("a", "b", "c")) is None


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
    assert balancer.choose("pool") is None
    assert not balancer.alive("pool")
    assert make()[0].choose("another") is None
    assert make()[0].alive("pool")
