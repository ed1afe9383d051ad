from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.periods import from_ms, period_at, to_ms
from gateway.tenants.principal import BudgetPeriod

# Clocks that change at midnight, zones east and west of everything, a zone that lost a whole day (Apia, 2011-12-30).
ZONES = ["UTC", "Europe/Berlin", "America/Havana", "Asia/Beirut", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu"]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("kind", "zone", "now", "start", "end"),
    [
        ("day", "UTC", "2026-11-29T17:00Z", "2026-11-29T00:00Z", "2026-11-30T00:00Z"),
        ("day", "Europe/Berlin", "2026-11-29T23:30Z", "2026-11-29T23:00Z", "2026-11-30T23:00Z"),
        ("day", "Europe/Berlin", "2026-03-29T12:00Z", "2026-03-28T23:00Z", "2026-03-29T22:00Z"),  # 23 hours
        ("day", "Europe/Berlin", "2026-10-25T12:00Z", "2026-10-24T22:00Z", "2026-10-25T23:00Z"),  # 25 hours
        ("week", "America/New_York", "2026-11-30T04:59Z", "2026-11-23T05:00Z", "2026-11-30T05:00Z"),
        ("month", "UTC", "2026-12-31T23:59Z", "2026-12-01T00:00Z", "2027-01-01T00:00Z"),
        ("month", "Asia/Tokyo", "2028-02-29T15:00Z", "2028-02-29T15:00Z", "2028-03-31T15:00Z"),
        ("day", "America/Sao_Paulo", "2018-11-04T12:00Z", "2018-11-04T03:00Z", "2018-11-05T02:00Z"),  # no midnight
        ("day", "America/Havana", "2026-11-01T04:30Z", "2026-11-01T04:00Z", "2026-11-02T05:00Z"),  # midnight twice
        ("day", "America/Havana", "2026-11-01T05:30Z", "2026-11-01T04:00Z", "2026-11-02T05:00Z"),
    ],
)
def test_a_period_begins_and_ends_at_local_midnight(
    kind: BudgetPeriod, zone: str, now: str, start: str, end: str
) -> None:
    period = period_at(kind, zone, at(now))
    assert (period.start, period.end) == (at(start), at(end))


def test_a_total_has_no_end() -> None:
    period = period_at("total", "UTC", at("2026-11-29T17:00Z"))
    assert period.holds(at("1970-01-01T00:00Z"))
    assert period.holds(at("9999-01-01T00:00Z"))


@given(
    st.sampled_from(["day", "week", "month"]),
    st.sampled_from(ZONES),
    st.datetimes(datetime(2005, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_periods_hold_their_moment_and_leave_no_gap(kind: BudgetPeriod, zone: str, moment: datetime) -> None:
    period = period_at(kind, zone, moment)
    assert period.holds(moment)
    assert not period.holds(period.end)
    assert period_at(kind, zone, period.start) == period
    assert period_at(kind, zone, period.end).start == period.end
    assert period_at(kind, zone, period.start - timedelta(milliseconds=1)).end == period.start
    first = period.start.astimezone(ZoneInfo(zone))
    assert kind != "week" or first.weekday() == 0
    assert kind != "month" or first.day == 1


@given(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_milliseconds_there_and_back(moment: datetime) -> None:
    assert from_ms(to_ms(moment)) == moment.replace(microsecond=moment.microsecond // 1000 * 1000)
