from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from gateway.routing.policy import SET_ASIDE_S, Balancer
from gateway.routing.route import Endpoint, Target

ENDPOINTS = [Endpoint(id, "pool", f"http://{id}", "m", 100) for id in ("a", "b", "c")]


TARGETS = (Target("pool", "m"),)


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
    choice = choose(balancer, tried=tried)
    assert choice is not None
    return choice.id


def choose(
    balancer: Balancer, *, pool: str = "pool", context_length: int = 100, tried: tuple[str, ...] = ()
) -> Endpoint | None:
    choice = balancer.choose([Target(pool, "m")], "chat_completions", context_length=context_length, tried=tried)
    return choice.endpoint if choice is not None else None


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
    assert choose(balancer, tried=("a", "b", "c")) is None


def test_one_set_aside_comes_last_for_a_while() -> None:
    balancer, clock = make()
    balancer.failed(ENDPOINTS[0], unhealthy=True, unreachable=True)
    assert {chosen(balancer) for _ in range(6)} == {"b", "c"}
    assert chosen(balancer, tried=("b", "c")) == "a"
    clock.time += SET_ASIDE_S + 0.1
    assert {chosen(balancer) for _ in range(6)} == {"a", "b", "c"}


def test_the_only_one_is_taken_even_if_set_aside() -> None:
    balancer, _ = make(ENDPOINTS[:1])
    balancer.failed(ENDPOINTS[0], unhealthy=True, unreachable=True)
    assert chosen(balancer) == "a"


def test_an_empty_pool_has_none() -> None:
    balancer, _ = make([])
    assert choose(balancer, context_length=100) is None
    assert balancer.context_length(TARGETS, "chat_completions") is None
    assert choose(make()[0], pool="another") is None


def test_one_that_takes_more_than_was_reserved_for_is_left_out() -> None:
    longer = Endpoint("longer", "pool", "http://longer", "m", 200)
    balancer, _ = make([ENDPOINTS[0], longer])
    assert balancer.context_length(TARGETS, "chat_completions") == 200
    assert {chosen(balancer) for _ in range(6)} == {"a"}
    assert choose(balancer, context_length=199, tried=("a",)) is None
    assert choose(balancer, context_length=200, tried=("a",)) == longer
