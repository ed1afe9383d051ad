"""Steps planned and submitted before the tokens of the one before are read: what changes, and what must not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.worker.engine.asking import Clock, drain, engine, request, run, scheduler, spans, tokens_of
from tests.worker.engine.toy_runner import text_alone
from worker.engine.messages import EngineOutput


def test_the_next_step_is_planned_before_this_ones_tokens_are_read() -> None:
    s = scheduler(depth=2)
    s.add(request("a", 6, 4))
    first = s.schedule()
    second = s.schedule()
    assert (spans(first), spans(second)) == ([(0, 0, 6, True)], [(0, 6, 1, True)])
    with pytest.raises(RuntimeError, match="not been retired"):
        s.schedule()
    assert second is not None
    with pytest.raises(RuntimeError, match="not the next to retire"):
        run(s, second)
    assert [o.token_ids for o in run(s, first, 7)] == [[7]]
    third = s.schedule()
    assert spans(third) == [(0, 7, 1, True)]
    assert [o.token_ids for o in run(s, second, 8)] == [[8]]
    fourth = s.schedule()
    assert spans(fourth) == [(0, 8, 1, True)]
    run(s, third, 9)
    assert s.schedule() is None  # the last draw has no step after it
    assert run(s, fourth, 10) == [EngineOutput("a", [10], "length")]


def test_what_is_drawn_after_a_stop_is_thrown_away_and_its_blocks_wait_for_the_step() -> None:
    s = scheduler(depth=2)
    s.add(request("a", 4, 9, stop=[7]))
    first, second = s.schedule(), s.schedule()
    (output,) = run(s, first, 7, elapsed_us=100)
    assert (output.token_ids, output.finish_reason, output.compute_us) == ([7], "stop", 100)
    assert not s.has_requests
    assert s.stats.kv_usage > 0
    assert s.schedule() is None
    assert run(s, second, 8, elapsed_us=60) == []
    assert s.stats.kv_usage == 0
    assert (s.stats.overhead_us, s.stats.step_us) == (60, 160)


def test_a_request_aborted_with_two_steps_in_flight_keeps_its_blocks_until_the_later_one_retires() -> None:
    s = scheduler(depth=2, caching=True)
    s.add(request("a", 3, 9))
    first, second = s.schedule(), s.schedule()  # the second fills a block, with a token that nobody will know
    assert s.abort("a")
    assert run(s, first) == []
    assert s.stats.kv_usage > 0
    assert run(s, second) == []
    assert (s.stats.kv_usage, s.stats.cached_blocks) == (0, 0)


def test_a_request_preempted_in_flight_keeps_the_token_that_was_being_drawn() -> None:
    made, runner = engine(overlap=True, toy={"num_blocks": 7}, max_running=3, max_batched_tokens=32)  # 6 blocks of 4
    asked = [request(name, 5, 12, seed=seed) for seed, name in enumerate("ab")]
    for one in asked:
        made.add(one)
    outputs = drain(made)
    assert made.stats.preemptions > 0
    for one in asked:
        assert tokens_of(outputs[one.request_id]) == text_alone(one.prompt_token_ids, one.sampling, 12)[0]
    assert sum(span.sample for plan in runner.steps for span in plan.spans) == 24, "a token was drawn twice"


def test_one_victim_is_enough_though_its_blocks_come_only_when_the_step_in_flight_has_retired() -> None:
    made, _ = engine(overlap=True, toy={"num_blocks": 7}, max_batched_tokens=32)  # 6 blocks of 4
    for index in range(3):  # all three need a third block in the same step
        made.add(request(f"r{index}", 4, 8, seed=index))
    drain(made)
    assert made.stats.preemptions == 1


def test_blocks_that_a_step_in_flight_still_touches_are_waited_for_by_no_more_than_they_serve() -> None:
    s = scheduler(9, depth=2, max_batched_tokens=16)  # 8 blocks of 4
    for name in "abcd":
        s.add(request(name, 4, 9))
    before = s.schedule()
    for _ in range(4):  # until each has used two blocks up
        plan = s.schedule()
        run(s, before)
        before = plan
    s.abort("b")
    assert s.schedule() is None
    assert s.stats.preemptions == 1  # "a" and "c" wait for the two blocks of "b"


def test_names_of_blocks_reach_the_cache_when_their_step_has_retired_and_not_before() -> None:
    s = scheduler(depth=2, caching=True, max_batched_tokens=64)
    s.add(request("a", 8, 9))
    first = s.schedule()
    s.add(request("b", 12, 9))  # begins with the same 8 tokens
    second = s.schedule()
    assert second is not None
    assert spans(second) == [(0, 8, 1, True), (1, 0, 12, True)]
    run(s, first)
    s.add(request("c", 12, 9))
    third = s.schedule()
    assert spans(third)[-1] == (2, 8, 4, True)  # not the third block, which "b" computes in flight
    run(s, second)
    run(s, third)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tight", [False, True])
def test_the_text_is_the_same_with_and_without_overlap(seed: int, tight: bool) -> None:
    def run_load(overlap: bool) -> dict[str, Any]:
        source = random.Random(seed)
        made, _ = engine(
            overlap=overlap, max_running=8, max_batched_tokens=32, toy={"num_blocks": 24 if tight else 200}
        )
        asked = []
        for index in range(40):
            prompt, output = source.randint(1, 30), source.randint(1, 30)
            stop = [source.randrange(1000) for _ in range(20)]
            asked.append(request(f"r{index}", prompt, output, seed=index % 3, stop=stop, tenant=str(index % 4)))
            made.add(asked[-1])
        outputs = drain(made)
        assert made.stats.preemptions > 10 or not tight
        return {
            name: (tokens_of(told), told[-1].finish_reason, told[-1].stop_token_id) for name, told in outputs.items()
        }

    assert run_load(True) == run_load(False)


def test_times_of_overlapping_steps_are_counted_once() -> None:
    clock = Clock(tick=0.001)
    made, _ = engine(overlap=True, clock=clock, max_batched_tokens=32)
    for index in range(4):
        made.add(request(f"r{index}", 5, 20, seed=index))
    started = clock.now
    outputs = drain(made)
    paid = sum(output.compute_us for told in outputs.values() for output in told)
    assert paid + made.stats.overhead_us == made.stats.step_us
    assert made.stats.step_us <= (clock.now - started) * 1e6
