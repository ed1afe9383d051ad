from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.routing.breaker import COOL_DOWN_S, FAILURES_IN_A_ROW
from gateway.routing.policy import TRIES_A_TIER
from gateway.routing.route import Endpoint, Target
from gateway.routing.standing import BUSY_S, LONGEST_ASIDE_S, UNKNOWN_MODEL_S
from tests.gateway.routing.support import Rig, endpoint

A, B, C, D = (endpoint(id) for id in "abcd")


def counted(rig: Rig, times: int = 1000, *, tried: tuple[str, ...] = ()) -> Counter[str | None]:
    return Counter(rig.id(tried=tried) for _ in range(times))


def break_(rig: Rig, *endpoints: Endpoint) -> None:
    for each in endpoints:
        rig.balancer.failed(each, unhealthy=True, unreachable=True, code="no_backend_available")


def test_equals_get_alike() -> None:
    found = counted(Rig(A, B, C))
    assert set(found) == {"a", "b", "c"}
    assert min(found.values()) > 280


@pytest.mark.parametrize("pool", [[A, B], [A, B, C], [A, B, C, D]])
def test_the_one_with_the_most_requests_is_never_taken(pool: list[Endpoint]) -> None:
    rig = Rig(*pool)
    with ExitStack() as in_use:
        in_use.enter_context(rig.balancer.using(A))
        in_use.enter_context(rig.balancer.using(A))
        in_use.enter_context(rig.balancer.using(B))
        found = counted(rig)
        assert "a" not in found
        assert set(found) == {each.id for each in pool} - {"a"}
    assert set(counted(rig)) == {each.id for each in pool}
    assert rig.balancer.in_flight() == {}


def test_others_requests_count_as_well_and_a_little_later_what_they_began_since() -> None:
    rig = Rig(A, B)
    rig.balancer.adopt({"a": 9}, {}, replicas=4)
    assert set(counted(rig)) == {"b"}
    with ExitStack() as in_use:
        # Three others do as this one does: 3 requests here are 12 altogether.
        for _ in range(3):
            in_use.enter_context(rig.balancer.using(B))
        assert set(counted(rig)) == {"a"}
        rig.balancer.adopt({"a": 9}, {}, replicas=4)
        assert set(counted(rig)) == {"b"}
    rig.balancer.adopt({}, {}, replicas=1)
    assert set(counted(rig)) == {"a", "b"}


def test_one_replica_alone_knows_what_it_has_begun() -> None:
    rig = Rig(A, B)
    rig.balancer.adopt({"a": 3}, {}, replicas=1)
    with rig.balancer.using(B), rig.balancer.using(B):
        assert set(counted(rig)) == {"b"}


def test_weights_of_endpoints_are_shares_idle_or_loaded() -> None:
    rig = Rig(endpoint("small", weight=1.0), endpoint("large", weight=3.0))
    assert 700 < counted(rig)["large"] < 800
    with ExitStack() as in_use:
        found: Counter[str] = Counter()
        for _ in range(400):
            chosen = rig.choose()
            assert chosen is not None
            found[chosen.id] += 1
            in_use.enter_context(rig.balancer.using(chosen))
    assert 298 <= found["large"] <= 302


def test_a_weight_of_zero_is_for_when_no_other_is_left() -> None:
    rig = Rig(endpoint("zero", weight=0.0), A, endpoint("nought", weight=0.0))
    assert set(counted(rig)) == {"a"}
    assert set(counted(rig, tried=("a",))) == {"zero", "nought"}
    break_(rig, A)
    assert set(counted(rig)) == {"zero", "nought"}


def test_lower_priorities_come_first_within_a_pool() -> None:
    rig = Rig(endpoint("later", priority=1), A, B)
    assert set(counted(rig)) == {"a", "b"}
    break_(rig, A)
    assert set(counted(rig)) == {"b"}
    break_(rig, B)
    assert set(counted(rig)) == {"later"}


def test_a_split_between_targets_holds_whatever_the_load() -> None:
    rig = Rig(endpoint("x", "most"), endpoint("y", "few"), endpoint("z", "few", priority=5))
    rig.targets = [Target("most", "m", weight=90), Target("few", "m", weight=10)]
    with ExitStack() as in_use:
        for _ in range(100):
            in_use.enter_context(rig.balancer.using(rig.pools["most"][0]))
        found = counted(rig, 4000)
    assert 0.08 < found["y"] / 4000 < 0.12
    assert found["z"] == 0
    break_(rig, rig.pools["few"][0])
    assert 0.08 < counted(rig, 4000)["z"] / 4000 < 0.12


def test_targets_by_priority_and_those_of_weight_zero_last_of_all() -> None:
    rig = Rig(endpoint("p0", "0"), endpoint("p1", "1"), endpoint("none", "none"))
    rig.targets = [Target("none", "m", weight=0), Target("1", "other", priority=1), Target("0", "m", priority=0)]
    assert set(counted(rig)) == {"p0"}
    break_(rig, rig.pools["0"][0])
    choice = rig.balancer.choose(rig.targets, "chat_completions", context_length=100)
    assert choice is not None
    assert (choice.endpoint.id, choice.model) == ("p1", "other")
    assert rig.id(tried=("p0", "p1")) == "none"


def test_after_some_failures_in_a_tier_the_next_one_is_tried() -> None:
    rig = Rig(*(endpoint(f"first{n}", "first") for n in range(8)), endpoint("second", "second"))
    rig.targets = [Target("first", "m"), Target("second", "m", priority=1)]
    tried: list[str] = []
    for _ in range(TRIES_A_TIER):
        chosen = rig.id(tried=tuple(tried))
        assert chosen is not None
        assert chosen.startswith("first")
        tried.append(chosen)
    assert rig.id(tried=tuple(tried)) == "second"
    tried.append("second")
    assert (rig.id(tried=tuple(tried)) or "").startswith("first")


def test_an_endpoints_own_name_of_the_model_goes_before_the_targets() -> None:
    rig = Rig(endpoint("a", sends_model="theirs"))
    choice = rig.balancer.choose(rig.targets, "chat_completions", context_length=100)
    assert choice is not None
    assert choice.model == "theirs"


def test_those_tried_are_left_out() -> None:
    rig = Rig(A, B, C)
    assert set(counted(rig, tried=("a", "c"))) == {"b"}
    assert rig.id(tried=("a", "b", "c")) is None


def test_one_that_cannot_be_reached_comes_last_for_a_while() -> None:
    rig = Rig(A, B, C)
    break_(rig, A)
    assert set(counted(rig)) == {"b", "c"}
    assert rig.id(tried=("b", "c")) == "a"
    rig.clock.time += COOL_DOWN_S * 1.3
    assert set(counted(rig)) == {"a", "b", "c"}


def test_of_one_on_trial_there_is_one_trial_and_its_first_event_is_enough() -> None:
    rig = Rig(A, B)
    break_(rig, A)
    rig.clock.time += COOL_DOWN_S * 1.3
    with rig.balancer.using(B), rig.balancer.using(A), rig.balancer.using(B):
        assert set(counted(rig)) == {"b"}
        rig.balancer.answering(A)
        assert set(counted(rig)) == {"a"}
    assert set(counted(rig)) == {"a", "b"}


def test_a_trial_that_was_broken_off_makes_way_for_another() -> None:
    rig = Rig(A, B)
    break_(rig, A)
    rig.clock.time += COOL_DOWN_S * 1.3
    with rig.balancer.using(A):
        assert set(counted(rig)) == {"b"}
    assert set(counted(rig)) == {"a", "b"}


def test_with_all_breakers_open_requests_are_tried_nevertheless() -> None:
    rig = Rig(A, B)
    break_(rig, A, B)
    assert set(counted(rig)) == {"a", "b"}
    assert rig.id(tried=("a",)) == "b"
    with rig.balancer.using(A):
        rig.balancer.succeeded(A)
    assert set(counted(rig)) == {"a"}


def test_failures_in_a_row_set_an_endpoint_aside() -> None:
    rig = Rig(A, B)
    for _ in range(FAILURES_IN_A_ROW):
        assert set(counted(rig)) == {"a", "b"}
        rig.balancer.failed(A, unhealthy=True, code="backend_error")
    assert set(counted(rig)) == {"b"}


def test_refusals_of_a_request_prove_that_an_endpoint_lives() -> None:
    rig = Rig(A)
    for _ in range(100):
        rig.balancer.failed(A, unhealthy=False, code="context_length_exceeded")
    (health,) = rig.balancer.snapshot()
    assert (health.breaker, health.last_error) == ("closed", None)


def test_one_that_asks_to_be_left_alone_is() -> None:
    rig = Rig(A, B)
    rig.balancer.failed(A, unhealthy=False, busy=True, retry_after_s=7, code="rate_limit_exceeded")
    assert set(counted(rig)) == {"b"}
    assert rig.id(tried=("b",)) is None
    assert rig.balancer.wait_s(rig.targets, "chat_completions", context_length=100) == 0
    rig.balancer.failed(B, unhealthy=True, retry_after_s=3, code="engine_overloaded")
    assert rig.id() is None
    assert rig.balancer.wait_s(rig.targets, "chat_completions", context_length=100) == 3
    assert [health.breaker for health in rig.balancer.snapshot()] == ["closed", "closed"]
    rig.clock.time += 3.1
    assert set(counted(rig)) == {"b"}
    rig.clock.time += 4
    assert set(counted(rig)) == {"a", "b"}


def test_no_backend_is_left_alone_for_longer_than_a_minute() -> None:
    rig = Rig(A)
    rig.balancer.failed(A, unhealthy=False, busy=True, retry_after_s=86_400)
    assert rig.balancer.wait_s(rig.targets, "chat_completions", context_length=100) == LONGEST_ASIDE_S


def test_a_busy_one_that_does_not_say_until_when_comes_last_for_a_second() -> None:
    rig = Rig(A, B)
    for _ in range(20):
        rig.balancer.failed(A, unhealthy=False, busy=True)
    assert set(counted(rig)) == {"b"}
    assert rig.id(tried=("b",)) == "a"
    rig.clock.time += BUSY_S + 0.1
    assert set(counted(rig)) == {"a", "b"}


def test_what_was_told_outranks_what_was_guessed() -> None:
    rig = Rig(A)
    rig.balancer.failed(A, unhealthy=False, busy=True)
    rig.balancer.failed(A, unhealthy=False, busy=True, retry_after_s=5)
    rig.balancer.failed(A, unhealthy=False, busy=True)
    assert rig.id() is None
    rig.clock.time += 5.1
    assert rig.id() == "a"


def test_most_replicas_are_believed_that_an_endpoint_is_dead() -> None:
    rig = Rig(A, B)
    rig.balancer.adopt({}, {"a": 2}, replicas=4)
    assert set(counted(rig)) == {"a", "b"}
    rig.balancer.adopt({}, {"a": 3}, replicas=4)
    assert set(counted(rig)) == {"b"}
    assert rig.balancer.votes() == []  # hearsay is not passed on
    assert rig.id(tried=("b",)) == "a"
    rig.balancer.adopt({}, {}, replicas=4)
    assert set(counted(rig)) == {"a", "b"}


def test_a_vote_lapses_with_the_cool_down() -> None:
    rig = Rig(A, B)
    break_(rig, A)
    assert rig.balancer.votes() == ["a"]
    rig.clock.time += COOL_DOWN_S * 1.3
    assert rig.balancer.votes() == []


def test_one_that_does_not_serve_a_model_comes_last_for_it_and_not_for_others() -> None:
    rig = Rig(A, B)
    for _ in range(20):
        rig.balancer.failed(A, unhealthy=True, unknown_model="m", code="backend_not_found")
    assert set(counted(rig)) == {"b"}
    assert rig.id(tried=("b",)) == "a"
    rig.targets = [Target("pool", "another")]
    assert set(counted(rig)) == {"a", "b"}
    rig.targets = [Target("pool", "m")]
    rig.clock.time += UNKNOWN_MODEL_S + 0.1
    assert set(counted(rig)) == {"a", "b"}
    rig.balancer.failed(A, unhealthy=True, unknown_model="n")
    (standing,) = (each for each in rig.balancer._standings.values() if each.id == "a")
    assert standing.unknown_models.keys() == {"n"}


def test_an_endpoint_that_changed_is_another_one() -> None:
    rig = Rig(endpoint("a", revision=1), B)
    break_(rig, rig.pools["pool"][0])
    assert set(counted(rig)) == {"b"}
    rig.pools["pool"][0] = endpoint("a", revision=2)
    assert set(counted(rig)) == {"a", "b"}
    break_(rig, rig.pools["pool"][0])
    rig.pools["pool"][0] = Endpoint("a", "pool", "http://elsewhere", "m", 100, revision=2)
    assert set(counted(rig)) == {"a", "b"}


def test_what_is_gone_is_forgotten_when_nothing_runs_there_any_more() -> None:
    rig = Rig(A, B)
    break_(rig, A)
    with rig.balancer.using(B):
        rig.balancer.keep_only([])
        assert [health.endpoint for health in rig.balancer.snapshot()] == ["b"]
    rig.balancer.keep_only([])
    assert rig.balancer.snapshot() == []
    assert set(counted(rig)) == {"a", "b"}


def test_an_empty_pool_has_none() -> None:
    rig = Rig()
    rig.targets = [Target("pool", "m")]
    assert rig.choose() is None
    assert rig.balancer.context_length(rig.targets, "chat_completions") is None
    assert rig.balancer.wait_s(rig.targets, "chat_completions", context_length=100) is None


def test_one_that_takes_more_than_was_reserved_for_is_left_out() -> None:
    rig = Rig(A, endpoint("longer", context_length=200))
    assert rig.balancer.context_length(rig.targets, "chat_completions") == 200
    assert set(counted(rig)) == {"a"}
    assert rig.id(context_length=199, tried=("a",)) is None
    assert rig.id(context_length=200, tried=("a",)) == "longer"


def test_one_that_does_not_speak_the_api_is_left_out() -> None:
    rig = Rig(endpoint("claude", family="anthropic"), A)
    for _ in range(20):
        choice = rig.balancer.choose(rig.targets, "embeddings", context_length=100)
        assert choice is not None
        assert choice.endpoint.id == "a"


def test_the_snapshot_tells_what_an_operator_asks() -> None:
    rig = Rig(A, B)
    break_(rig, A)
    rig.balancer.failed(B, unhealthy=False, busy=True, retry_after_s=10, code="rate_limit_exceeded")
    rig.balancer.adopt({"b": 4}, {"b": 2}, replicas=3)
    rig.clock.time += 1
    with rig.balancer.using(B):
        a, b = rig.balancer.snapshot()
    assert (a.endpoint, a.pool, a.breaker, a.last_error, a.last_error_s) == (
        "a",
        "pool",
        "open",
        "no_backend_available",
        1,
    )
    assert (b.in_flight, b.in_flight_elsewhere, b.breaker, b.overruled, b.set_aside_s) == (1, 4, "closed", True, 9)


kinds = st.sampled_from(["well", "dead", "busy", "told", "overruled", "unknown"])
drawn_endpoints = st.lists(
    st.tuples(
        st.sampled_from(["one", "two"]), kinds, st.sampled_from([0.0, 1e-9, 1.0, 1e6]), st.integers(0, 2), st.booleans()
    ),
    max_size=8,
)
drawn_targets = st.lists(
    st.tuples(st.sampled_from(["one", "two", "none"]), st.sampled_from([0.0, 0.5, 1e6]), st.integers(0, 2)), max_size=4
)


@given(drawn_endpoints, drawn_targets, st.sets(st.integers(0, 7)), st.integers(0, 9))
def test_whatever_there_is_a_usable_one_is_taken_if_there_is_one(
    endpoints: list[tuple[str, str, float, int, bool]],
    targets: list[tuple[str, float, int]],
    tried: set[int],
    seed: int,
) -> None:
    made = [
        endpoint(str(number), pool, weight=weight, priority=priority, context_length=100 if fits else 101)
        for number, (pool, _, weight, priority, fits) in enumerate(endpoints)
    ]
    rig = Rig(*made, seed=seed)
    rig.targets = [Target(pool, "m", weight, priority) for pool, weight, priority in targets]
    rig.balancer.adopt(
        {"0": 5}, {e.id: 2 for e, (_, kind, *_) in zip(made, endpoints, strict=True) if kind == "overruled"}, replicas=3
    )
    for each, (_, kind, *_) in zip(made, endpoints, strict=True):
        rig.balancer.failed(
            each,
            unhealthy=kind == "dead",
            unreachable=kind == "dead",
            busy=kind in ("busy", "told"),
            retry_after_s=5.0 if kind == "told" else None,
            unknown_model="m" if kind == "unknown" else None,
        )
    pools = {target.pool for target in rig.targets}
    candidates = [
        (each, kind)
        for each, (pool, kind, _, _, fits) in zip(made, endpoints, strict=True)
        if fits and pool in pools and int(each.id) not in tried
    ]
    chosen = rig.choose(tried=tuple(map(str, tried)))
    well = [each for each, kind in candidates if kind == "well"]
    if well:
        assert chosen in well
        assert chosen.weight > 0 or all(each.weight == 0 for each in well if each.pool == chosen.pool)
    else:
        assert (chosen is None) == all(kind == "told" for _, kind in candidates)
        assert chosen is None or chosen in [each for each, kind in candidates if kind != "told"]


def test_the_log_says_when_a_breaker_opens_and_closes() -> None:
    one = endpoint("a")
    rig = Rig(one)
    for finish in (rig.balancer.answering, rig.balancer.succeeded):
        with capture_logs() as logs:
            rig.balancer.failed(one, unhealthy=True, unreachable=True, code="backend_timeout")
            rig.balancer.answering(one)  # of a request from before
            rig.clock.time += 60
            finish(one)
            finish(one)
        told = [(log["event"], log["backend"]) for log in logs]
        assert told == [("breaker_opened", "a"), ("breaker_closed", "a")]
