"""Whatever happens to the KV cache, every sequence reads what it, or one with the same beginning, has written."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.engine.cache_model import MAX_STEP, CacheModel
from worker.engine.plan import CacheGroup

GROUPS = [
    (CacheGroup(),),
    (CacheGroup(), CacheGroup(window=5)),
    (CacheGroup(window=3), CacheGroup(), CacheGroup(window=8)),
    (CacheGroup(window=4, sinks=2),),
    (CacheGroup(window=1), CacheGroup(window=6, sinks=4)),
]
SALTS = ["", "", "", "", "acme", "globex"]


@pytest.mark.parametrize("host_blocks", [0, 5, 60])
@pytest.mark.parametrize("groups", GROUPS)
def test_long_random_runs(groups: tuple[CacheGroup, ...], host_blocks: int) -> None:
    """Deep states: pools that are always full, hits on both tiers, loads that fail, resets in the midst of copies."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        rng = random.Random(seed)
        model = CacheModel(rng.randrange(6, 16) * len(groups), groups, host_blocks, bounded=seed % 2 == 0)
        for _ in range(300):
            move(model, rng)
            model.check()
        model.close()
        seen += model.seen
    assert seen["admitted"] > 100
    assert seen["hits"] > 50
    assert seen["resumed"] > 10
    if host_blocks >= 60:
        assert seen["host_hits"] > 20
        assert seen["loads"] > 10
        assert seen["orphans"] > 2
        assert seen["failures"] > 5
    if host_blocks >= 60 and len(groups) == 1:
        assert seen["shortened"] > 0


def move(model: CacheModel, rng: random.Random) -> None:
    """One of the things that can happen, oftener those that lead somewhere."""
    pick = rng.randrange(1000)
    kind = rng.choices(
        ["arrive", "step", "run", "let_go", "resume", "submit", "finish", "reset"], [20, 25, 22, 4, 8, 14, 28, 0.3]
    )[0]
    if kind == "arrive" and len(model.live) < 5:
        token_ids = [rng.randrange(3)] * rng.randrange(1, 15) + [9] * rng.choice([0, 0, 0, 1])
        model.arrive(token_ids, rng.choice(SALTS), rng.random() < 0.9, rng.choice([0, 0, 0, 1, 2]))
    elif kind == "step" and (ready := model.ready()):
        live = ready[pick % len(ready)]
        model.step(live, rng.randrange(1, MAX_STEP + 1))
        if rng.random() < 0.7:
            model.retire(live)
    elif kind == "run" and model.live:
        model.run(model.live[pick % len(model.live)])
    elif kind == "let_go" and model.live:
        model.let_go(model.live[pick % len(model.live)], preempt=rng.random() < 0.7)
    elif kind == "resume" and model.preempted:
        model.resume(pick)
    elif kind == "submit":
        model.submit()
    elif kind == "finish" and model.copies:
        chance = rng.choice([0.0, 0.0, 0.3])
        model.finish(pick, lambda number: rng.random() < chance)
    elif kind == "reset":
        model.reset()


class CacheMachine(RuleBasedStateMachine):
    """The same moves, chosen and, where one fails, shortened by hypothesis."""

    @initialize(
        num_blocks=st.integers(8, 30),
        groups=st.sampled_from(GROUPS),
        host_blocks=st.sampled_from([0, 3, 60]),
        bounded=st.booleans(),
    )
    def start(self, num_blocks: int, groups: tuple[CacheGroup, ...], host_blocks: int, bounded: bool) -> None:
        self.model = CacheModel(num_blocks, groups, host_blocks, bounded)

    @precondition(lambda self: len(self.model.live) < 5)
    @rule(
        document=st.integers(1, 3),
        length=st.integers(1, 14),
        tail=st.lists(st.just(9), max_size=2),
        salt=st.sampled_from(SALTS),
        read_cache=st.booleans(),
        reserve=st.integers(0, 2),
        run=st.booleans(),
    )
    def arrive(
        self, document: int, length: int, tail: list[int], salt: str, read_cache: bool, reserve: int, run: bool
    ) -> None:
        live = self.model.arrive([document] * length + tail, salt, read_cache, reserve)
        if live is not None and run:
            self.model.run(live)

    @precondition(lambda self: self.model.ready())
    @rule(pick=st.integers(0, 4), count=st.integers(1, MAX_STEP), retire=st.booleans())
    def step(self, pick: int, count: int, retire: bool) -> None:
        ready = self.model.ready()
        live = ready[pick % len(ready)]
        self.model.step(live, count)
        if retire:
            self.model.retire(live)

    @precondition(lambda self: self.model.live)
    @rule(pick=st.integers(0, 4))
    def run_to_the_end(self, pick: int) -> None:
        self.model.run(self.model.live[pick % len(self.model.live)])

    @precondition(lambda self: self.model.live)
    @rule(pick=st.integers(0, 4), preempt=st.booleans())
    def let_go(self, pick: int, preempt: bool) -> None:
        self.model.let_go(self.model.live[pick % len(self.model.live)], preempt)

    @precondition(lambda self: self.model.preempted)
    @rule(pick=st.integers(0, 4))
    def resume(self, pick: int) -> None:
        self.model.resume(pick)

    @rule()
    def submit(self) -> None:
        self.model.submit()

    @precondition(lambda self: self.model.copies)
    @rule(pick=st.integers(0, 4), failed=st.sets(st.integers(0, 8), max_size=3))
    def finish(self, pick: int, failed: set[int]) -> None:
        self.model.finish(pick, lambda number: number in failed)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @invariant()
    def all_is_in_order(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.close()


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestKVCache = CacheMachine.TestCase
