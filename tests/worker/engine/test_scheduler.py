from collections import Counter, defaultdict

import pytest

from tests.worker.engine.asking import finish, request, run, scheduler, spans
from worker.engine.compute_cost import CostModel
from worker.engine.messages import EngineOutput
from worker.engine.plan import StepResult
from worker.engine.request import QueueFull, RequestRejected


def first(name: str, tokens: list[int], reason: str | None = None, **more: object) -> EngineOutput:
    """A request's first output."""
    return EngineOutput(name, tokens, reason, cached_tokens=0, queued_us=0, **more)  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_budget_runs_in_chunks_and_draws_at_its_end() -> None:
    s = scheduler()
    s.add(request("a", 40, 2))
    plan = s.schedule()
    assert spans(plan) == [(0, 0, 16, False)]
    assert run(s, plan) == [first("a", [], prefilled=16)]
    plan = s.schedule()
    assert spans(plan) == [(0, 16, 16, False)]
    assert run(s, plan) == [EngineOutput("a", [], prefilled=32)]
    plan = s.schedule()
    assert spans(plan) == [(0, 32, 8, True)]
    assert run(s, plan) == [EngineOutput("a", [9])]
    plan = s.schedule()
    assert spans(plan) == [(0, 40, 1, True)]
    assert run(s, plan) == [EngineOutput("a", [9], "length")]
    assert s.schedule() is None
    assert not s.has_requests
    assert s.stats.kv_usage == 0
    assert s.stats.computed_tokens == 41


def test_decodes_come_first_and_leave_the_rest_of_the_budget_to_prefill() -> None:
    s = scheduler()
    s.add(request("a", 4, 10))
    run(s, s.schedule())
    s.add(request("b", 40, 10))
    s.add(request("c", 4, 10))
    plan = s.schedule()
    assert spans(plan) == [(0, 4, 1, True), (1, 0, 4, True), (2, 0, 11, False)]
    run(s, plan)
    assert spans(s.schedule()) == [(0, 5, 1, True), (1, 4, 1, True), (2, 11, 14, False)]


def test_a_bound_on_one_prompts_chunk_lets_short_ones_in_beside_a_long_one() -> None:
    s = scheduler(max_prefill_per_request=6)
    s.add(request("long", 60, 2))
    s.add(request("short", 4, 2))
    s.add(request("other", 5, 2))
    plan = s.schedule()
    assert spans(plan) == [(0, 0, 4, True), (1, 0, 5, True), (2, 0, 6, False)]
    run(s, plan)
    assert spans(s.schedule()) == [(0, 4, 1, True), (1, 5, 1, True), (2, 6, 6, False)]


def test_a_prefill_of_a_higher_class_never_starves_a_decode() -> None:
    s = scheduler(max_batched_tokens=8)
    s.add(request("short", 2, 12, priority=1))
    run(s, s.schedule())
    s.add(request("long", 60, 4, priority=0))
    for step in range(8):
        plan = s.schedule()
        assert spans(plan) == [(0, 2 + step, 1, True), (1, 7 * step, 7, False)]
        run(s, plan)


def test_a_prompt_of_a_higher_class_goes_before_the_rest_of_one_that_has_begun() -> None:
    s = scheduler()
    s.add(request("batch", 40, 2, priority=5))
    run(s, s.schedule())
    s.add(request("interactive", 10, 2, priority=-5))
    assert spans(s.schedule()) == [(1, 0, 10, True), (0, 16, 6, False)]


def test_classes_go_first_then_arrival() -> None:
    s = scheduler(max_running=1)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0)]:
        s.add(request(name, 4, 1, priority=priority))
    assert [output.request_id for output in finish(s)] == ["b", "d", "a", "c"]


def test_the_victim_is_of_the_lowest_class_then_the_newest_and_is_recomputed() -> None:
    s = scheduler(10, max_running=4, max_batched_tokens=32)  # 9 blocks of 4
    s.add(request("low-old", 7, 12, priority=1))
    s.add(request("low-new", 7, 12, priority=1))
    s.add(request("high", 7, 20, priority=0))
    preempted = []
    names: dict[int, str] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    while (plan := s.schedule()) is not None:
        names |= {r.key: r.request_id for r in s._roster.running}
        preempted += [names[key] for key in plan.retired if names[key] in s._roster.open]
        for output in run(s, plan, token=5):
            tokens[output.request_id] += output.token_ids
    assert preempted[0] == "low-new"
    assert "high" not in preempted
    assert s.stats.preemptions == len(preempted)
    assert {name: len(t) for name, t in tokens.items()} == {"low-old": 12, "low-new": 12, "high": 20}


def test_a_victim_is_of_the_lowest_class_even_if_it_was_there_first() -> None:
    s = scheduler(7, max_running=4, max_batched_tokens=32)  # 6 blocks of 4
    s.add(request("low", 7, 12, priority=1))
    run(s, s.schedule())
    s.add(request("high", 7, 12, priority=0))
    while not s.stats.preemptions:
        run(s, s.schedule())
    assert [r.request_id for r in s._roster.running] == ["high"]


def test_a_higher_class_takes_the_places_of_a_lower_one_and_no_more_than_it_needs() -> None:
    s = scheduler(max_running=3, max_batched_tokens=32)
    for name in "abc":
        s.add(request(name, 4, 20, priority=1))
    run(s, s.schedule())
    for name in "xy":
        s.add(request(name, 4, 20, priority=0))
    run(s, s.schedule())
    assert [r.request_id for r in s._roster.running] == ["a", "x", "y"]
    s.add(request("z", 4, 20, priority=1))  # of the same class: waits
    run(s, s.schedule())
    assert [r.request_id for r in s._roster.running] == ["a", "x", "y"]
    assert s.stats.preemptions == 2


def test_a_prompt_computed_anew_is_not_reported_anew() -> None:
    s = scheduler(10, max_running=2, max_batched_tokens=2)  # 9 blocks of 4
    s.add(request("old", 4, 12))
    while not run(s, s.schedule())[0].token_ids:
        pass
    s.add(request("new", 24, 2))
    told: list[int | None] = []
    tokens = 0
    while (plan := s.schedule()) is not None:
        for output in run(s, plan):
            assert (output.prefilled is None) == bool(output.token_ids)
            if output.request_id == "new" and output.token_ids:
                tokens += 1
            elif output.request_id == "new":
                assert not tokens
                told.append(output.prefilled)
    assert s.stats.preemptions == 1
    assert tokens == 2
    assert len(told) > 10
    assert told == sorted(set(told), key=lambda count: count or 0)
    assert told[0] == 1
    assert told[-1] in (22, 23)


def test_preempted_requests_wait_before_those_of_their_class_that_came_later() -> None:
    s = scheduler(9, max_running=4, max_batched_tokens=32)  # 8 blocks of 4
    for name in "abcd":
        s.add(request(name, 4, 20))
    order = [output.request_id for output in finish(s) if output.finish_reason]
    assert s.stats.preemptions >= 2
    assert order == ["a", "b", "c", "d"]


def test_a_newcomer_leaves_the_running_a_block_each_to_grow_into() -> None:
    s = scheduler(7, max_batched_tokens=32)  # 6 blocks of 4
    s.add(request("a", 8, 4))
    s.add(request("b", 8, 4))
    s.add(request("c", 4, 4))
    run(s, s.schedule())
    assert (s.stats.running, s.stats.waiting) == (2, 1)
    finish(s)
    assert s.stats.preemptions == 0


def test_a_preempted_request_is_sent_again_whole_under_a_new_key() -> None:
    s = scheduler(6, max_batched_tokens=32)  # 5 blocks of 4
    s.add(request("a", [1, 2, 3, 4, 5, 6, 7], 9))
    s.add(request("b", [1, 2, 3], 9))
    sent: dict[int, list[int]] = {}
    while (plan := s.schedule()) is not None:
        for new in plan.new:
            assert new.num_prompt in (7, 3)
            sent[new.key] = new.token_ids
        run(s, plan, token=8)
    assert list(sent) == [0, 1, 2]
    assert sent[2][:3] == [1, 2, 3]
    assert set(sent[2][3:]) == {8}


def test_with_the_prefix_cache_a_preempted_request_finds_most_of_what_it_had() -> None:
    computed = {}
    for caching in (False, True):
        s = scheduler(14, max_batched_tokens=64, caching=caching)  # 13 blocks of 4
        for index, name in enumerate("abc"):
            s.add(request(name, 12, 16, seed=index))
        finish(s)
        assert s.stats.preemptions >= 1
        computed[caching] = s.stats.computed_tokens
    needed = 3 * (12 + 15)
    assert computed[False] > needed + 12
    assert computed[True] <= needed + 2 * 4 * s.stats.preemptions


def test_who_was_preempted_for_a_plan_is_not_in_it_again() -> None:
    s = scheduler()
    s.add(request("a", 4, 9))
    run(s, s.schedule())
    (victim,) = s._roster.running
    s._roster.preempt(victim)
    assert not s._admission.admit(victim, 2)
    assert spans(s.schedule()) == [(1, 0, 5, True)]


def test_computing_anew_after_preemption_is_overhead_and_all_else_is_paid_once() -> None:
    """Each step takes as many microseconds as its spans cost units, so that every share is exact."""
    costs = CostModel(16)
    s = scheduler(9, max_running=4, max_batched_tokens=10, costs=costs)  # 8 blocks of 4
    paid: Counter[str] = Counter()
    for index, name in enumerate("abc"):
        s.add(request(name, 5 + index, 14))
    while (plan := s.schedule()) is not None:
        elapsed_us = sum(costs.units(span.start, span.start + span.count) for span in plan.spans)
        for output in run(s, plan, elapsed_us=elapsed_us):
            paid[output.request_id] += output.compute_us
    assert s.stats.preemptions >= 2
    assert paid == {name: costs.units(0, 5 + index + 14 - 1) for index, name in enumerate("abc")}
    assert s.stats.overhead_us == s.stats.step_us - sum(paid.values()) > 0


def test_nobody_overtakes_the_head_of_the_queue_for_want_of_blocks() -> None:
    s = scheduler(9, max_batched_tokens=64)
    s.add(request("a", 16, 4))
    run(s, s.schedule())
    s.add(request("big", 24, 4))
    s.add(request("small", 4, 4))
    plan = s.schedule()
    assert plan is not None
    assert plan.new == []
    assert s.stats.waiting == 2


def test_who_waits_for_blocks_is_tried_again_when_its_beginning_was_computed_by_another() -> None:
    s = scheduler(13, max_batched_tokens=64, caching=True)  # 12 blocks of 4
    for name in ("a", "b"):
        s.add(request(name, 32, 12))
    run(s, s.schedule())
    assert (s.stats.running, s.stats.waiting) == (1, 1)  # 8 blocks each
    run(s, s.schedule())
    assert (s.stats.running, s.stats.waiting) == (2, 0)
    assert s.stats.cache_hits == 28


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_abort_frees_everything_at_once(state: str) -> None:
    s = scheduler(10, max_running=1 if state == "waiting" else 4, max_batched_tokens=8)
    s.add(request("other", 4, 20))
    if state == "waiting":
        run(s, s.schedule())
        s.add(request("a"))
    elif state == "prefill":
        s.add(request("a", 20))
        run(s, s.schedule())
    elif state == "decode":
        s.add(request("a", 4, 10))
        run(s, s.schedule())
        run(s, s.schedule())
    else:
        s.add(request("a", 12, 20))
        while not s.stats.preemptions:
            run(s, s.schedule())
        assert s.stats.waiting == 1
    assert s.abort("a")
    assert not s.abort("a")
    (other,) = s._roster.open.values()
    assert s._kv.num_free == 9 - len(other.blocks.tables[0])
    assert s.stats.waiting == 0
    assert [o.request_id for o in run(s, s.schedule())] == ["other"]
    finish(s)
    assert s._kv.num_free == 9


def test_abort_while_a_step_is_in_flight_keeps_the_blocks_until_it_has_retired() -> None:
    s = scheduler(10)
    s.add(request("a", 4, 8))
    plan = s.schedule()
    free = s._kv.num_free
    assert s.abort("a")
    assert s._kv.num_free == free
    assert not s.has_requests
    assert run(s, plan, elapsed_us=50) == []
    assert s._kv.num_free == 9
    assert s.stats.overhead_us == 50
    assert s.schedule() is None


def test_a_full_queue_refuses_at_once() -> None:
    s = scheduler(max_running=2, max_waiting=1)
    for name in "abc":
        s.add(request(name))
    with pytest.raises(QueueFull, match="3 requests open"):
        s.add(request("d"))
    assert s.abort("b")
    s.add(request("d"))


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    s = scheduler(4)  # 12 tokens
    s.add(request("fits", 8, 4))
    with pytest.raises(RequestRejected, match="make 13 tokens; the KV cache holds 12"):
        s.add(request("too long", 8, 5))
    with pytest.raises(RequestRejected, match="open already"):
        s.add(request("fits"))


def test_a_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    s = scheduler()
    s.add(request("a", 4, 8, stop=(5, 6)))
    run(s, s.schedule(), token=4)
    assert run(s, s.schedule(), token=6) == [EngineOutput("a", [6], "stop", stop_token_id=6)]
    s.add(request("b", 4, 1, stop=(6,)))
    assert run(s, s.schedule(), token=6) == [first("b", [6], "stop", stop_token_id=6)]


def test_plans_that_are_not_retired_in_turn_are_refused() -> None:
    s = scheduler()
    s.add(request("a", 4, 8))
    plan = s.schedule()
    with pytest.raises(RuntimeError, match="not been retired"):
        s.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match="drew 2 tokens"):
        s.update(plan, StepResult([1, 2]))
    run(s, plan)
    with pytest.raises(RuntimeError, match="not the next to retire"):
        run(s, plan)


def test_budgets_that_leave_a_sequence_without_a_token_are_refused() -> None:
    with pytest.raises(ValueError, match="each running sequence needs one token"):
        scheduler(max_batched_tokens=3, max_running=4)
    with pytest.raises(ValueError, match="max_prefill_per_request is 0"):
        scheduler(max_prefill_per_request=0)
