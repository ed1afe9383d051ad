from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.breaker import (
    COOL_DOWN_S,
    FAILURES_IN_A_ROW,
    JITTER,
    LEAST_REQUESTS,
    LONGEST_COOL_DOWN_S,
    MISSED_PROBES,
    WINDOW_S,
    Breaker,
)


def make() -> Breaker:
    return Breaker(Random(1))


def opened(now: float = 100.0) -> Breaker:
    breaker = make()
    assert breaker.failed(now, at_once=True)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = make()
    for _ in range(10):
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert not breaker.failed(100.0)
        breaker.succeeded(100.0)
        # So many successes that the share of failures stays low.
        for _ in range(2 * FAILURES_IN_A_ROW):
            breaker.succeeded(100.0)
    for _ in range(FAILURES_IN_A_ROW):
        assert breaker.state(100.0) == "closed"
        breaker.failed(100.0)
    assert breaker.state(100.0) == "open"


def test_a_share_of_failures_opens_it_once_there_were_enough_requests() -> None:
    breaker = make()
    for number in range(LEAST_REQUESTS - 1):
        assert breaker.state(100.0) == "closed"
        if number % 2:
            breaker.succeeded(100.0)
        else:
            breaker.failed(100.0)
    assert breaker.failed(100.0)


def test_failures_of_long_ago_count_no_more() -> None:
    breaker = make()
    now = 100.0
    for number in range(LEAST_REQUESTS * 3):
        now += WINDOW_S / LEAST_REQUESTS * 1.1
        if number % 2:
            breaker.succeeded(now)
        else:
            assert not breaker.failed(now)


def test_after_the_cool_down_a_success_closes_it() -> None:
    breaker = opened()
    assert breaker.state(100.0 + COOL_DOWN_S * (1 - JITTER) * 0.99) == "open"
    later = 100.0 + COOL_DOWN_S * (1 + JITTER)
    assert breaker.state(later) == "half_open"
    breaker.succeeded(later)
    assert breaker.state(later) == "closed"


def test_a_success_of_what_was_sent_before_it_opened_proves_nothing() -> None:
    breaker = opened()
    breaker.succeeded(100.5)
    breaker.answered(100.5)
    assert breaker.state(100.5) == "open"
    breaker.trials += 1  # sent for want of any better endpoint
    breaker.succeeded(100.6)
    assert breaker.state(100.6) == "closed"


def test_trials_that_fail_lengthen_the_cool_down_up_to_a_cap() -> None:
    breaker = opened()
    now, lengths = 100.0, []
    for _ in range(12):
        lengths.append(breaker.open_until - now)
        now = breaker.open_until
        assert breaker.failed(now)
    for length, doubled in zip(lengths, (2.0 ** (n + 1) for n in range(12)), strict=True):
        wanted = min(doubled * COOL_DOWN_S / 2, LONGEST_COOL_DOWN_S)
        assert wanted * (1 - JITTER) <= length <= wanted * (1 + JITTER)
    assert len({round(length, 6) for length in lengths}) == 12  # jitter


def test_many_failures_at_once_are_one_opening() -> None:
    breaker = opened()
    until = breaker.open_until
    for _ in range(50):
        assert not breaker.failed(100.1, at_once=True)
    assert breaker.open_until == until


def test_closing_by_a_first_token_does_not_forget_how_often_it_opened() -> None:
    """A backend that begins every answer and ends none is left alone for longer each time."""
    breaker = opened()
    now = breaker.open_until
    breaker.answered(now)
    assert breaker.state(now) == "closed"
    breaker.failed(now, at_once=True)
    assert breaker.open_until - now > COOL_DOWN_S * (1 + JITTER)
    now = breaker.open_until
    breaker.succeeded(now)
    breaker.succeeded(now)
    breaker.failed(now, at_once=True)
    assert breaker.open_until - now <= COOL_DOWN_S * (1 + JITTER)


def test_missed_probes_open_it_and_one_that_is_answered_between_them_does_not() -> None:
    breaker = make()
    for _ in range(5):
        for _ in range(MISSED_PROBES - 1):
            breaker.probed(100.0, alive=False)
        breaker.probed(100.0, alive=True)
    assert breaker.state(100.0) == "closed"
    for _ in range(MISSED_PROBES):
        breaker.probed(100.0, alive=False)
    assert breaker.state(100.0) == "open"


def test_a_probe_that_is_answered_allows_a_trial_and_no_more() -> None:
    breaker = opened()
    breaker.probed(100.5, alive=True)
    assert breaker.state(100.5) == "half_open"


def test_a_probe_that_is_missed_begins_the_cool_down_anew() -> None:
    breaker = opened()
    now = breaker.open_until
    breaker.probed(now, alive=False)
    assert breaker.state(now) == "open"
    assert breaker.open_until - now > COOL_DOWN_S * (1 + JITTER)


def test_a_probe_that_a_trial_belied_is_believed_no_more_until_it_closes() -> None:
    breaker = opened()
    breaker.probed(100.5, alive=True)
    assert breaker.failed(100.6)
    breaker.probed(100.7, alive=True)
    assert breaker.state(100.7) == "open"
    now = breaker.open_until
    breaker.succeeded(now)
    assert breaker.state(now) == "closed"
    breaker.failed(now, at_once=True)
    breaker.probed(now + 0.1, alive=True)
    assert breaker.state(now + 0.1) == "half_open"


events = st.lists(
    st.tuples(st.sampled_from(["good", "answered", "bad", "at once", "alive", "dead", "trial"]), st.floats(0, 10)),
    max_size=60,
)


@given(events)
def test_whatever_happens_it_allows_a_trial_again_within_the_longest_cool_down(steps: list[tuple[str, float]]) -> None:
    breaker, now = make(), 100.0
    for what, passed in steps:
        now += passed
        match what:
            case "good":
                breaker.succeeded(now)
            case "answered":
                breaker.answered(now)
            case "bad":
                breaker.failed(now)
            case "at once":
                breaker.failed(now, at_once=True)
                assert breaker.state(now) != "closed"
            case "trial":
                breaker.trials ^= 1
            case _:
                breaker.probed(now, alive=what == "alive")
        assert breaker.open_until <= now + LONGEST_COOL_DOWN_S * (1 + JITTER)
    breaker.succeeded(max(now, breaker.open_until))
    assert breaker.state(now) == "closed"
