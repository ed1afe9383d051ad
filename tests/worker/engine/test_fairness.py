"""Tenants of one class share by weight; none can crowd out another."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.asking import finish, request, run, scheduler, spans
from worker.engine.fairness import INPUT_CHARGE, OUTPUT_CHARGE, Tenants
from worker.engine.preemption import MAX_DISPLACEMENTS


def test_tenants_take_turns_whoever_came_first() -> None:
    s = scheduler(max_running=1)
    for name in ["a1", "a2", "a3", "b1", "b2"]:
        s.add(request(name, 8, 2, tenant=name[0]))
    order = [output.request_id for output in finish(s) if output.finish_reason]
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_tenants_that_were_given_nothing_go_in_the_order_in_which_they_came() -> None:
    s = scheduler(max_running=1)
    s.add(request("busy", 8, 6, tenant="busy"))
    run(s, s.schedule())
    order = []
    for number in range(30):  # faster than they can be served, and each of them new
        if number < 8:
            s.add(request(str(number), 4, 1, tenant=f"tenant-{number}"))
        if s.has_requests:
            order += [output.request_id for output in run(s, s.schedule()) if output.finish_reason]
    assert [name for name in order if name != "busy"] == [str(number) for number in range(8)]


def test_without_fairness_the_first_come_are_the_first_served() -> None:
    s = scheduler(max_running=1, fair=False)
    for name in ["a1", "a2", "a3", "b1", "b2"]:
        s.add(request(name, 8, 2, tenant=name[0]))
    order = [output.request_id for output in finish(s) if output.finish_reason]
    assert order == ["a1", "a2", "a3", "b1", "b2"]


def test_the_salt_stands_for_the_tenant_if_none_is_named() -> None:
    s = scheduler(max_running=1)
    for name in ["a1", "a2", "b1"]:
        s.add(request(name, 8, 2, salt=name[0]))
    assert [output.request_id for output in finish(s) if output.finish_reason] == ["a1", "b1", "a2"]


def test_a_newcomer_is_lifted_to_the_least_counter_and_saves_nothing_up() -> None:
    tenants = Tenants()
    busy = tenants.enter(0, "busy", 1.0)
    busy.served = 100.0
    assert tenants.enter(0, "new", 1.0).served == 100.0
    assert tenants.enter(1, "new", 1.0).served == 0.0  # another class, another account
    busy.served = 300.0
    debtor = tenants.enter(0, "debtor", 1.0)
    assert debtor.served == 100.0
    debtor.served = 250.0
    tenants.leave(debtor)
    assert tenants.enter(0, "debtor", 1.0) is debtor  # leaving does not pay a debt
    assert debtor.served == 250.0


def test_counters_of_idle_classes_and_paid_debts_are_forgotten() -> None:
    tenants = Tenants()
    stays = tenants.enter(0, "stays", 1.0)
    stays.served = 5.0
    for index in range(100):
        tenants.leave(tenants.enter(0, f"passing-{index}", 1.0))
    assert list(tenants._classes[0]) == ["stays"]
    tenants.leave(stays)
    assert tenants._classes == {}
    assert tenants.enter(0, "stays", 1.0).served == 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=3), min_size=3, max_size=3
    ),
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=3, max_size=3),
    st.integers(2, 8),
    st.integers(8, 40),
    st.none() | st.integers(1, 20),
)
def test_tenants_that_always_have_work_are_served_alike_within_the_bound(
    shapes: list[list[tuple[int, int]]],
    weights: list[float],
    max_running: int,
    budget: int,
    max_prefill: int | None,
) -> None:
    """Whatever the lengths of their requests; what they were given is divided by their weights."""
    s = scheduler(
        400,
        max_running=max_running,
        max_batched_tokens=budget,
        max_waiting=500,
        max_prefill_per_request=max_prefill,
    )
    waiting: Counter[str] = Counter()
    lengths: dict[str, int] = {}
    for number in range(60):
        for name, own, weight in zip("abc", shapes, weights, strict=True):
            prompt, output = own[number % len(own)]
            s.add(request(f"{name}-{number}", prompt, output, tenant=name, weight=weight))
            lengths[f"{name}-{number}"] = prompt
            waiting[name] += 1
    in_flight = max_running * max(prompt + output for own in shapes for prompt, output in own)
    bound = 2 * max(INPUT_CHARGE * max(lengths.values()), OUTPUT_CHARGE * in_flight) / min(weights)
    served: Counter[str] = Counter()
    owners: dict[int, str] = {}
    paid: Counter[str] = Counter()
    """Tokens of each prompt that were computed; recomputing after a displacement serves nobody."""
    while True:
        plan = s.schedule()
        assert plan is not None
        for request_ in s._roster.running:
            owners[request_.key] = request_.request_id
        for span in plan.spans:
            owner = owners[span.key]
            end = min(span.start + span.count, lengths[owner])
            served[owner[0]] += max(0, end - paid[owner]) * INPUT_CHARGE + span.sample * OUTPUT_CHARGE
            paid[owner] = max(end, paid[owner])
        for output in run(s, plan):
            waiting[output.request_id[0]] -= output.queued_us is not None
        if not min(waiting.values()):
            break  # from now on somebody has nothing to wait for
        shares = [served[name] / weight for name, weight in zip("abc", weights, strict=True)]
        assert max(shares) - min(shares) <= bound
    assert min(served.values()) > 0


def test_a_newcomer_runs_in_the_next_step_though_all_places_are_taken() -> None:
    s = scheduler(200, max_running=4, max_batched_tokens=16, max_waiting=100)
    for number in range(40):
        s.add(request(f"flood-{number}", 8, 30, tenant="flood"))
    for _ in range(6):
        run(s, s.schedule())
    assert s.stats.running == 4
    for number in range(5):
        s.add(request(f"other-{number}", 8, 3, tenant="other"))
        plan = s.schedule()
        assert plan is not None
        assert [n.token_ids[:1] for n in plan.new] == [[0]]
        assert any(r.request_id == f"other-{number}" and r.key == plan.new[0].key for r in s._roster.running)
        assert spans(plan)[-1][2:] == (8, True)
        run(s, plan)
        while f"other-{number}" in s._roster.open:
            run(s, s.schedule())


def test_tenants_that_hold_about_as_many_places_do_not_displace_each_other() -> None:
    lengths = random.Random(1)
    s = scheduler(400, max_running=8, max_batched_tokens=64, max_waiting=300)
    for number in range(60):
        s.add(request(f"a-{number}", 8, lengths.randint(15, 30), tenant="a"))
    for _ in range(4):
        run(s, s.schedule())
    for number in range(60):
        s.add(request(f"b-{number}", 8, lengths.randint(15, 30), tenant="b"))
    for _ in range(10):
        run(s, s.schedule())
    assert Counter(r.tenant.name for r in s._roster.running) == {"a": 6, "b": 2}
    assert s.stats.preemptions == 2
    while s.stats.waiting > 20:
        run(s, s.schedule())
    assert s.stats.preemptions < 10


def test_a_heavier_tenant_takes_more_places() -> None:
    s = scheduler(400, max_running=6, max_batched_tokens=48, max_waiting=200)
    for number in range(20):
        s.add(request(f"a-{number}", 4, 60, tenant="a"))
    run(s, s.schedule())
    for number in range(20):
        s.add(request(f"b-{number}", 4, 60, tenant="b", weight=2.0))
    for _ in range(8):
        run(s, s.schedule())
    assert Counter(r.tenant.name for r in s._roster.running) == {"a": 3, "b": 3}
    assert s.stats.preemptions == 3


@pytest.mark.parametrize("tenants", [2, 5])
def test_displacement_is_bounded_however_the_tenants_change(tenants: int) -> None:
    s = scheduler(400, max_running=6, max_batched_tokens=64, max_waiting=300)
    for number in range(100):
        s.add(request(f"flood-{number}", 6, 12, tenant="flood"))
    number = 0
    while s.has_requests:
        if number < 60:
            for index in range(number % tenants):
                s.add(request(f"{index}-{number}", 5, 4, tenant=str(index)))
            number += 1
        run(s, s.schedule())
        assert all(r.displaced <= MAX_DISPLACEMENTS for r in s._roster.open.values())
    assert s.stats.preemptions > 0


def test_nobody_is_displaced_more_than_so_many_times() -> None:
    s = scheduler(400, max_running=3, max_batched_tokens=64, max_waiting=300)
    for number in range(3):
        s.add(request(f"long-{number}", 4, 400, tenant="long"))
    for number in range(20):
        s.add(request(f"short-{number}", 4, 2, tenant=f"short-{number}"))
        for _ in range(4):
            run(s, s.schedule())
    assert s.stats.preemptions == 3 * MAX_DISPLACEMENTS


def test_recomputing_after_preemption_is_not_charged() -> None:
    s = scheduler(9, max_running=4, max_batched_tokens=32)  # 8 blocks of 4
    s.add(request("a", 8, 16, tenant="one"))
    s.add(request("b", 8, 16, tenant="one"))
    s.add(request("idle", 4, 1, tenant="other", priority=9))  # keeps its class, not this one, open
    tenant = s._roster.open["a"].tenant
    served = 0.0
    while "a" in s._roster.open or "b" in s._roster.open:
        run(s, s.schedule())
        served = max(served, tenant.served)
    assert s.stats.preemptions >= 1
    assert served == 2 * (8 * INPUT_CHARGE + 16 * OUTPUT_CHARGE)
