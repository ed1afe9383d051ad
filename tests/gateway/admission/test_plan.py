from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from gateway.admission.plan import Counter, Plans
from gateway.ids import uuid7
from tests.gateway.admission.support import limit, tenant

NOW = datetime(2026, 11, 29, 17, 0, tzinfo=UTC)


def names(packed: bytes) -> Any:
    return msgspec.msgpack.decode(packed)


def test_what_bears_on_a_request_is_chosen_once_and_kept() -> None:
    principal = tenant(
        5,
        None,
        (10, "day"),
        limit("tokens", 7, "hour", "model", "large"),
        limit("tokens", 8, "hour", "key", "another"),
        limit("requests", 9, "day", "end_user"),
    )
    plans = Plans()
    plan = plans.plan(principal, "tiny", None, NOW)
    assert names(plan.counters) == ["b:day:tenant:", "r:minute:tenant:"]
    assert plans.plan(principal, "tiny", None, NOW) is plan
    assert plans.plan(replace(principal), "tiny", None, NOW) is plan
    assert names(plans.plan(principal, "large", None, NOW).counters)[-1] == "t:hour:model:large"
    of_user = plans.plan(principal, "tiny", "ada", NOW)
    assert "r:day:each:" in names(of_user.counters)
    assert plans.plan(principal, "tiny", "bob", NOW) is of_user


def test_end_users_with_limits_of_their_own_have_plans_of_their_own() -> None:
    principal = tenant(None, None, None, limit("requests", 1, "day", "end_user", "ada"))
    plans = Plans()
    assert names(plans.plan(principal, "tiny", "ada", NOW).counters) == ["r:day:end_user:ada"]
    assert names(plans.plan(principal, "tiny", "bob", NOW).counters) == []
    assert names(plans.plan(principal, "tiny", None, NOW).counters) == []


def test_changed_limits_another_zone_and_another_day_make_a_new_plan() -> None:
    tenant_id = uuid7()
    principal = tenant(budget=(10, "day"), tenant_id=tenant_id)
    plans = Plans()
    plan = plans.plan(principal, "tiny", None, NOW)
    [period] = plan.periods
    assert period is not None
    assert period.end == datetime(2026, 11, 30, tzinfo=UTC)
    [next_day] = plans.plan(principal, "tiny", None, NOW + timedelta(hours=7)).periods
    assert next_day is not None
    assert next_day.start == period.end
    assert plans.plan(principal, "tiny", None, NOW).periods == (period,)  # a clock set back
    moved = plans.plan(replace(principal, timezone="Asia/Tokyo"), "tiny", None, NOW)
    assert moved.periods != plan.periods
    raised = plans.plan(tenant(budget=(11, "day"), tenant_id=tenant_id), "tiny", None, NOW)
    assert raised.limits[0].amount == 11


@pytest.mark.parametrize("target", ["", "a:b:c", "f00"])
@pytest.mark.parametrize("each", [False, True])
def test_a_counters_name_can_be_read_again(target: str, each: bool) -> None:
    counter = Counter("tokens", "hour", "end_user", target, each)
    assert Counter.parse(str(counter)) == counter
    slots = Counter("concurrent", None, "key", target)
    assert Counter.parse(str(slots)) == slots


def test_what_is_no_counter_is_not_read() -> None:
    with pytest.raises(ValueError, match="counter"):
        Counter.parse("x:day:tenant:")
