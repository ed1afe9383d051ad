"""A refusal names the limit that stands and what would help; it is repeated by clients only where that may help."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from gateway.admission.errors import Refused
from gateway.admission.ticket import Bound
from gateway.refusals import over_limit
from gateway.tenants.principal import BudgetPeriod, Metric, RateWindow, Subject
from worker.protocol.errors import ApiError

BOUND = Bound(1_500_000, 700)


def refusal(reason: Metric, **changes: Any) -> ApiError:
    values: dict[str, Any] = {
        "subject": "tenant",
        "window": "minute",
        "limit": 500,
        "remaining": 20,
        "retry_after_s": 3.2,
        "headers": {"x-ratelimit-limit-requests": "500"},
    }
    return over_limit(Refused(reason, **(values | changes)), BOUND)


def test_a_limit_that_passes_says_when() -> None:
    told = refusal("requests", subject="project")
    assert (told.status, told.body.type, told.body.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert told.body.message == "Over the limit of 500 requests per minute of this project. Wait as 'retry-after' says."
    assert told.headers == {"x-ratelimit-limit-requests": "500", "retry-after": "4"}


def test_tokens_say_how_many_were_wanted_and_are_left() -> None:
    told = refusal("tokens", subject="key", window="day")
    assert "500 tokens per day of this API key" in told.body.message
    assert "up to 700, of which 20 are left" in told.body.message
    never = refusal("tokens", retry_after_s=None)
    assert "It never fits" in never.body.message
    assert never.headers["x-should-retry"] == "false"
    assert "retry-after" not in never.headers


def test_slots_come_back_when_a_request_ends() -> None:
    told = refusal("concurrent", subject="end_user", window=None, retry_after_s=1)
    assert told.body.message.startswith("Over the limit of 500 requests at a time of this end user. Wait until one")
    assert told.headers["retry-after"] == "1"
    none = refusal("concurrent", window=None, limit=0, retry_after_s=None)
    assert "Waiting does not help" in none.body.message


def test_money_is_no_rate_and_is_not_repeated() -> None:
    told = refusal("budget", subject="model", window="month", retry_after_s=86_400.0)
    assert (told.body.type, told.body.code) == ("insufficient_quota", "insufficient_quota")
    assert "The monthly budget of your organisation's use of this model" in told.body.message
    assert "up to 0.0015 USD" in told.body.message
    assert "wait for the next period" in told.body.message
    assert (told.headers["x-should-retry"], told.headers["retry-after"]) == ("false", "86400")
    assert "next period" not in refusal("budget", window="total", retry_after_s=None).body.message


@pytest.mark.parametrize("subject", get_args(Subject))
def test_every_limit_has_words(subject: Subject) -> None:
    windows = {
        "requests": get_args(RateWindow),
        "tokens": get_args(RateWindow),
        "concurrent": (None,),
        "budget": get_args(BudgetPeriod),
    }
    told = set()
    cases = [(metric, window) for metric in get_args(Metric) for window in windows[metric]]
    for (metric, window), limit, wait in itertools.product(cases, (0, 500), (None, 1.0)):
        message = refusal(metric, subject=subject, window=window, limit=limit, retry_after_s=wait).body.message
        assert "None" not in message
        assert message.endswith(".")
        told.add((metric, window, message))
    assert len({message for _, _, message in told}) >= 2 * len(cases)
