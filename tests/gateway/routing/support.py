"""A clock that stands still, and endpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

from gateway.routing.policy import Balancer
from gateway.routing.route import Endpoint, Target


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return self.time


def endpoint(id: str, pool: str = "pool", **more: Any) -> Endpoint:
    return Endpoint(id, pool, f"http://{id}", "m", **({"context_length": 100} | more))


class Rig:
    """A balancer over ``pools``, which a test may change."""

    def __init__(self, *endpoints: Endpoint, seed: int = 1) -> None:
        self.clock = HandClock()
        self.pools: dict[str, list[Endpoint]] = {}
        for each in endpoints:
            self.pools.setdefault(each.pool, []).append(each)
        self.balancer = Balancer(lambda pool: self.pools.get(pool, []), self.clock, random=Random(seed))
        self.targets = [Target(pool, "m") for pool in self.pools]

    def choose(self, *, tried: tuple[str, ...] = (), context_length: int = 100) -> Endpoint | None:
        choice = self.balancer.choose(self.targets, "chat_completions", context_length=context_length, tried=tried)
        return None if choice is None else choice.endpoint

    def id(self, **more: Any) -> str | None:
        found = self.choose(**more)
        return None if found is None else found.id
