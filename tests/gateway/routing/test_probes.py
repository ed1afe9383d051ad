from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from gateway.routing.breaker import COOL_DOWN_S, MISSED_PROBES
from gateway.routing.probes import DOUBTFUL_SHARE, EVERY_S, Probes
from gateway.routing.route import Endpoint
from tests.gateway.routing.support import Rig, endpoint

DOUBTFUL_EVERY_S = EVERY_S * DOUBTFUL_SHARE
WORKER, DECLARED = endpoint("worker"), endpoint("declared", revision=1)


class Lab:
    """Endpoints that live or not, as a test says, and probes whose turns it calls."""

    def __init__(self, *endpoints: Endpoint, **more: Any) -> None:
        self.rig = Rig(*endpoints)
        self.balancer = self.rig.balancer
        self.alive: dict[str, bool | Exception | None] = {each.id: True for each in endpoints}
        self.asked: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.probes = Probes(
            lambda: [each for pool in self.rig.pools.values() for each in pool],
            self.balancer,
            self._probe,
            self.rig.clock,
            # Turns are called by hand.
            **({"turn_s": 3600.0, "timeout_s": 0.05, "random": Random(1)} | more),
        )

    async def _probe(self, endpoint: Endpoint) -> bool:
        self.asked[endpoint.id] += 1
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            outcome = self.alive[endpoint.id]
            if outcome is None:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if isinstance(outcome, Exception):
                raise outcome
            return bool(outcome)
        finally:
            self.at_once -= 1

    async def run(self, seconds: float, step_s: float = 0.25) -> None:
        """Let so much time pass by the clock."""
        for _ in range(round(seconds / step_s)):
            self.rig.clock.time += step_s
            self.probes.turn()
            await eventually(lambda: not self.probes.under_way)

    def state(self, id: str = "declared") -> str:
        return {health.endpoint: health.breaker for health in self.balancer.snapshot()}[id]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def test_a_declared_backend_is_probed_while_nothing_succeeds_there_and_a_worker_is_not() -> None:
    lab = Lab(WORKER, DECLARED)
    async with lab.probes:
        await lab.run(10 * EVERY_S)
        assert 10 <= lab.asked["declared"] <= 14
        assert lab.asked["worker"] == 0
        before = lab.asked["declared"]
        for _ in range(20):
            lab.balancer.succeeded(DECLARED)
            await lab.run(EVERY_S / 2)
        assert lab.asked["declared"] == before


async def test_a_worker_is_probed_while_requests_are_there_of_which_none_succeeds() -> None:
    lab = Lab(WORKER)
    async with lab.probes:
        with lab.balancer.using(WORKER):
            await lab.run(3 * EVERY_S)
        assert lab.asked["worker"] >= 2


async def test_a_new_one_is_not_probed_at_once() -> None:
    for seed in range(50):
        lab = Lab(WORKER, DECLARED, random=Random(seed))
        async with lab.probes:
            with lab.balancer.using(WORKER):
                lab.probes.turn()
            assert not lab.probes.under_way
            assert not lab.asked


async def test_one_that_dies_unused_is_found_dead_and_then_alive_again() -> None:
    lab = Lab(DECLARED)
    async with lab.probes:
        await lab.run(EVERY_S)
        lab.alive["declared"] = False
        await lab.run(EVERY_S + MISSED_PROBES * DOUBTFUL_EVERY_S)
        assert lab.state() == "open"
        await lab.run(120)
        assert lab.state() == "open"  # nobody's request has to find out
        lab.alive["declared"] = True
        await lab.run(DOUBTFUL_EVERY_S + 0.25)
        assert lab.state() == "half_open"
        with lab.balancer.using(DECLARED):
            lab.balancer.succeeded(DECLARED)
        assert lab.state() == "closed"


async def test_a_worker_whose_breaker_is_open_is_probed() -> None:
    lab = Lab(WORKER)
    async with lab.probes:
        lab.balancer.failed(WORKER, unhealthy=True, unreachable=True)
        await lab.run(COOL_DOWN_S)
        assert lab.asked["worker"] >= 1
        assert lab.state("worker") == "half_open"


async def test_probes_that_hang_or_raise_are_missed_and_hold_up_no_other() -> None:
    others = [endpoint(f"other{number}", revision=1) for number in range(3)]
    lab = Lab(endpoint("hangs", revision=1), endpoint("raises", revision=1), *others)
    lab.alive |= {"hangs": None, "raises": RuntimeError("no")}
    async with lab.probes:
        await lab.run(EVERY_S + 3 * MISSED_PROBES * DOUBTFUL_EVERY_S, step_s=1.0)
        assert (lab.state("hangs"), lab.state("raises")) == ("open", "open")
        assert {lab.state(each.id) for each in others} == {"closed"}


async def test_few_are_probed_at_once() -> None:
    lab = Lab(*(endpoint(f"e{number}", revision=1) for number in range(40)), at_once=4)
    async with lab.probes:
        await lab.run(2 * EVERY_S)
    assert len(lab.asked) == 40
    assert lab.most_at_once <= 4


async def test_one_is_not_probed_while_its_probe_is_under_way() -> None:
    lab = Lab(DECLARED, timeout_s=3600.0)
    lab.alive["declared"] = None
    async with lab.probes:
        for _ in range(400):
            lab.rig.clock.time += 0.25
            lab.probes.turn()
            await asyncio.sleep(0)
        assert lab.asked["declared"] == 1
    assert lab.at_once == 0  # leaving does not wait for it


async def test_what_is_gone_is_forgotten() -> None:
    lab = Lab(DECLARED, WORKER)
    async with lab.probes:
        await lab.run(EVERY_S * 1.5)
        assert lab.balancer.snapshot() != []
        lab.rig.pools.clear()
        await lab.run(1)
        assert lab.balancer.snapshot() == []


async def test_they_run_by_themselves() -> None:
    lab = Lab(DECLARED, turn_s=0.01)
    lab.balancer.failed(DECLARED, unhealthy=True, unreachable=True)
    async with lab.probes:
        lab.rig.clock.time += DOUBTFUL_EVERY_S * 10
        async with asyncio.timeout(5):
            while not lab.asked:
                lab.rig.clock.time += 1
                await asyncio.sleep(0.01)
