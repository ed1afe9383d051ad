"""Short prompts need not wait for the long ones of their tenant, and these get on beside them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.asking import request, run, scheduler, spans
from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.engine.messages import EngineRequest
from worker.engine.request import Status
from worker.engine.scheduler import Scheduler

TOY = [sys.executable, str(Path(__file__).with_name("toy_runner.py"))]


def step(s: Scheduler, asked: Iterable[EngineRequest] = ()) -> tuple[dict[str, int], list[str]]:
    """One step: how many tokens of each request's prompt were computed in it, and who drew a token."""
    for one in asked:
        s.add(one)
    before = {r.request_id: (r, r.num_scheduled) for r in s._roster.open.values()}
    plan = s.schedule()
    computed = {
        name: r.num_scheduled - start
        for name, (r, start) in before.items()
        if start < min(r.num_scheduled, r.num_prompt)
    }
    return computed, [output.request_id for output in run(s, plan) if output.token_ids]


@pytest.mark.parametrize("max_prefill", [None, 256, 100])
@pytest.mark.parametrize("longs", [1, 2, 6])
def test_short_prompts_do_not_wait_for_any_number_of_long_ones(longs: int, max_prefill: int | None) -> None:
    s = scheduler(
        4000,
        block_size=16,
        max_batched_tokens=512,
        max_running=16,
        max_waiting=64,
        max_prefill_per_request=max_prefill,
    )
    for number in range(longs):
        s.add(request(f"long-{number}", 6000, 4, tenant="a"))
    for _ in range(3):
        step(s)
    for number in range(3):
        s.add(request(f"short-{number}", 30, 4, tenant="a"))
    s.add(request("other", 30, 4, tenant="b"))
    computed, drawn = step(s)
    assert {"short-0", "short-1", "short-2", "other"} <= set(drawn)
    assert computed["long-0"] == min(max_prefill or 512, 512 - 4 * 30)


def test_a_second_long_prompt_goes_when_no_short_one_is_left() -> None:
    s = scheduler(max_batched_tokens=20, max_running=8)
    s.add(request("long", 60, 2))
    assert spans(s.schedule()) == [(0, 0, 20, False)]  # alone it has the whole step
    run(s, s._roster.in_flight[0].plan)
    s.add(request("also long", 40, 2))
    s.add(request("short", 4, 1))
    assert step(s) == ({"long": 16, "short": 4}, ["short"])
    s.add(request("shorter", 2, 1))
    for number in range(3):
        s.add(request(f"short-{number}", 9, 1))
    assert step(s)[0] == {"long": 10, "shorter": 2, "short-0": 8}
    assert step(s)[0] == {"long": 10, "short-0": 1, "short-1": 9}
    # The 4 that are left of the first long one are short, and came first; then it is the second one's turn.
    assert step(s)[0] == {"long": 4, "short-2": 8, "also long": 8}


def test_with_a_bound_on_chunks_a_second_long_prompt_has_what_no_short_one_needs() -> None:
    s = scheduler(max_batched_tokens=20, max_running=8, max_prefill_per_request=6)
    for name in ("long", "also long", "last"):
        s.add(request(name, 60, 2))
    assert step(s)[0] == {"long": 6, "also long": 6, "last": 6}
    for number in range(3):
        s.add(request(f"short-{number}", 4, 1))
    assert step(s)[0] == {"long": 6, "also long": 2, "short-0": 4, "short-1": 4, "short-2": 4}
    for number in range(3):
        s.add(request(f"more-{number}", 5, 1))
    assert step(s)[0] == {"long": 6, "more-0": 5, "more-1": 5, "more-2": 4}


def test_a_long_prompt_gives_other_tenants_nothing_before_their_turn() -> None:
    s = scheduler(max_batched_tokens=20)
    s.add(request("long", 60, 2, tenant="a"))
    s.add(request("short", 4, 2, tenant="b"))
    s.add(request("own", 3, 2, tenant="a"))
    plan = s.schedule()
    assert spans(plan) == [(0, 0, 3, True), (1, 0, 17, False)]
    run(s, plan)
    assert spans(s.schedule()) == [(0, 3, 1, True), (2, 0, 4, True), (1, 17, 15, False)]


def test_short_prompts_take_no_more_of_another_tenants_turn_than_their_long_one_would() -> None:
    s = scheduler(max_batched_tokens=40, max_running=16, max_waiting=20, max_prefill_per_request=24)
    s.add(request("long", 60, 2, tenant="a"))
    for number in range(5):
        s.add(request(f"short-{number}", 4, 1, tenant="a"))
    s.add(request("other", 9, 1, tenant="b"))
    # 24 is what the long one could have: it keeps 20, the first short one has 4, and then it is the other's turn.
    assert step(s)[0] == {"short-0": 4, "long": 24, "other": 9, "short-1": 3}


def test_a_second_long_prompt_waits_for_short_ones_though_others_had_their_turn_in_between() -> None:
    s = scheduler(max_batched_tokens=40, max_running=16, max_waiting=20, max_prefill_per_request=8)
    for name in ("long", "also long"):
        s.add(request(name, 60, 2, tenant="a"))
    for number in range(3):
        s.add(request(f"short-{number}", 4, 1, tenant="a"))
        s.add(request(f"other-{number}", 30, 1, tenant="b"))
    assert step(s)[0] == {"long": 8, "short-0": 4, "short-1": 4, "other-0": 8, "other-1": 8, "other-2": 8}


def test_many_decodes_leave_a_long_prompt_and_the_short_ones_half_of_the_rest() -> None:
    s = scheduler(max_batched_tokens=24, max_running=20, max_waiting=20)
    for number in range(16):
        s.add(request(f"decode-{number}", 1, 30))
    step(s)
    s.add(request("long", 60, 2))
    s.add(request("short", 10, 1))
    assert step(s)[0] == {"long": 4, "short": 4}


@pytest.mark.parametrize("max_prefill", [None, 7])
@pytest.mark.parametrize("output", [1, 3])
def test_long_prompts_go_on_in_order_under_an_endless_stream_of_short_ones(
    output: int, max_prefill: int | None
) -> None:
    s = scheduler(400, max_batched_tokens=32, max_running=12, max_waiting=400, max_prefill_per_request=max_prefill)
    longs = ["long-0", "long-1", "long-2"]
    for name in longs:
        s.add(request(name, 200, 1))
    drew: list[str] = []
    for number in range(100):
        decodes = sum(r.num_scheduled >= r.num_prompt for r in s._roster.running)
        first = next(name for name in longs if name not in drew)
        computed, drawn = step(s, [request(f"short-{number}-{index}", 16, output) for index in range(3)])
        drew += [name for name in drawn if name not in drew]
        assert first in drew or computed[first] == min(max_prefill or 32, (32 - decodes + 1) // 2)
        if set(longs) <= set(drew):
            break
    assert [name for name in drew if name in longs] == longs
    assert len(drew) - 3 >= number // 2, "short ones were served beside them"


def test_what_was_preempted_is_long_by_all_that_it_has_and_stays_the_first() -> None:
    s = scheduler(max_batched_tokens=8)
    s.add(request("a", 4, 30))
    for _ in range(8):
        step(s)
    (victim,) = s._roster.running
    s._roster.preempt(victim)
    s.add(request("also long", 10, 1))
    s.add(request("short", 3, 1))
    plan = s.schedule()
    assert [(r.request_id, r.num_scheduled) for r in s._roster.running] == [("short", 3), ("a", 5)]
    run(s, plan)
    assert victim.num_left == 12 - 5


def test_short_prompts_pass_a_long_one_that_waits_for_blocks_only_into_what_it_leaves() -> None:
    s = scheduler(14, max_running=8, max_waiting=20)  # 13 blocks of 4
    s.add(request("old", 20, 6))
    step(s)
    step(s)
    s.add(request("long", 36, 4))  # needs 9 blocks
    for number in range(3):
        s.add(request(f"short-{number}", 3, 3))  # may need 2, and leave 1 to grow into
    for _ in range(3):
        assert step(s)[1] == ["old", "short-0"]
    for _ in range(2):
        assert step(s)[1] == ["old", "short-1"], "one that passed has ended"
    assert s.stats.waiting == 2
    # The old one has ended: nothing that came later keeps the long one from its blocks.
    assert step(s)[0] == {"long": 12, "short-2": 3}


def test_a_tenants_short_prompts_pass_no_long_one_of_another() -> None:
    s = scheduler(14, max_running=8)  # 13 blocks of 4
    s.add(request("old", 20, 6, tenant="a"))
    step(s)
    step(s)
    s.add(request("long", 36, 4, tenant="b"))
    s.add(request("short", 3, 3, tenant="c"))
    for _ in range(5):
        assert step(s)[1] == ["old"]
    assert step(s)[0] == {"long": 16}
    assert step(s)[1] == ["short"]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_short_prompt_draws_within_a_few_steps_whatever_long_ones_there_are(data: st.DataObject) -> None:
    budget = data.draw(st.integers(56, 96))
    half = (budget + 1) // 2
    max_prefill = data.draw(st.none() | st.integers(4, budget))
    chunk = max_prefill or budget
    s = scheduler(2000, max_batched_tokens=budget, max_running=14, max_waiting=14, max_prefill_per_request=max_prefill)
    arrivals = st.integers(0, 25)
    longs = data.draw(st.lists(st.tuples(arrivals, st.integers(half + 1, 6 * budget)), min_size=1, max_size=6))
    shorts = data.draw(st.lists(st.tuples(arrivals, st.integers(1, half)), min_size=1, max_size=8))
    asked = [(at, request(f"long-{index}", length, 2)) for index, (at, length) in enumerate(longs)]
    asked += [(at, request(f"short-{index}", length, 3)) for index, (at, length) in enumerate(shorts)]
    lengths = {one.request_id: (at, len(one.prompt_token_ids)) for at, one in asked}
    all_short = sum(length for _, length in shorts)
    drew: dict[str, int] = {}
    number = 0
    while s.has_requests or number <= 25:
        left = {name: r.num_left for name, r in s._roster.open.items() if r.num_scheduled < r.num_prompt}
        coming = [one for at, one in asked if at == number]
        left |= {one.request_id: len(one.prompt_token_ids) for one in coming}
        if left:
            computed, drawn = step(s, coming)
            if sum(left[name] > half for name in computed) > 1:
                skipped = [
                    name for name, rest in left.items() if rest <= half and computed.get(name, 0) < min(rest, chunk)
                ]
                # Only what the last of the budget was spent on can have less than it could use.
                assert not skipped, "a second long prompt went before a short one"
            for name in drawn:
                drew.setdefault(name, number)
        elif s.has_requests:
            step(s)
        number += 1
        assert number < 3000
    # Ahead of a short one are others, and what is left of long ones when it is short too; of each step they have no
    # less than an eighth.
    for name, (at, length) in lengths.items():
        if name.startswith("short"):
            most = 2 + all_short // (budget // 8) + length // chunk + 2 * -(-half // chunk)
            assert drew[name] - at <= most
    in_order = sorted(range(len(longs)), key=lambda index: longs[index][0])
    if max_prefill is None:
        drawn_at = [drew[f"long-{index}"] for index in in_order]
        assert drawn_at == sorted(drawn_at), "long ones go in order of arrival"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_long_prompt_has_its_blocks_when_those_are_gone_that_held_some_before(data: st.DataObject) -> None:
    """However many short ones come after it, for ever, and whatever they draw."""
    capacity = data.draw(st.integers(20, 60))
    budget = data.draw(st.integers(12, 24))
    s = scheduler(capacity + 1, max_batched_tokens=budget, max_running=8, max_waiting=2000)
    for index in range(data.draw(st.integers(1, 5))):
        s.add(request(f"old-{index}", data.draw(st.integers(1, 20)), data.draw(st.integers(1, 30)), seed=index))
    for _ in range(data.draw(st.integers(3, 12))):
        if s.has_requests:
            step(s)
    length = data.draw(st.integers(budget + 1, 4 * capacity - 1))
    s.add(request("long", length, 1))
    short = st.tuples(st.integers(1, budget // 2), st.integers(1, 40))
    shapes = data.draw(st.lists(short, min_size=1, max_size=4))
    long = s._roster.open["long"]
    holders: set[str] | None = None
    for number in range(600):
        before = [r for r in s._roster.open.values() if r.arrival < long.arrival]
        if any(r.status is Status.WAITING or r.num_left > s._roster.most_short for r in before):
            holders = None  # its turn has not come, or one that was before it has it again
        elif holders is None:
            holders = {r.request_id for r in s._roster.running}
        gone = holders is not None and holders.isdisjoint(s._roster.open)
        prompt, output = shapes[number % len(shapes)]
        step(s, [request(f"short-{number}", prompt, output)])
        if long.status is not Status.WAITING:
            return
        assert not gone, "the long prompt waits for one that passed it"
    raise AssertionError("the long prompt starves")


async def test_short_prompts_do_not_wait_for_long_ones_in_a_live_engine() -> None:
    toy = {"num_blocks": 20_000, "max_running": 16, "step_s": 0.01}
    config = EngineConfig(model_path=json.dumps(toy), max_running=16)

    async def draw(client: EngineClient, asked: EngineRequest) -> None:
        async with client.generate(asked) as outputs:
            async for output in outputs:
                if output.token_ids:
                    return

    async with await EngineClient.start(config, command=TOY) as client:
        longs = [asyncio.create_task(draw(client, request(f"long-{n}", 30_000, 1, seed=n))) for n in range(8)]
        try:
            await asyncio.gather(*(draw(client, request(f"short-{n}", 30, 2, seed=n)) for n in range(3)))
            assert sum(task.done() for task in longs) < 4
        finally:
            for task in longs:
                task.cancel()
            await asyncio.gather(*longs, return_exceptions=True)
