from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from gateway.db.partitions import month_of, months_ahead, next_month, partition_ddl

MOMENTS = st.integers(946_684_800, 7_258_118_400).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(MOMENTS, OFFSETS)
def test_months_hold_their_moments_in_utc_whatever_the_zone(moment: datetime, zone: timezone) -> None:
    begin = month_of(moment.astimezone(zone))
    assert begin <= moment < next_month(begin)
    assert (begin.day, begin.hour, begin.utcoffset()) == (1, 0, timedelta(0))
    assert next_month(begin) == month_of(begin + timedelta(days=31))


def test_a_year_ends_in_december() -> None:
    months = list(months_ahead(datetime(2026, 11, 30, 23, 59, tzinfo=UTC), 2))
    assert [f"{month:%Y-%m}" for month in months] == ["2026-11", "2026-12", "2027-01"]


def test_a_partition_ends_where_the_next_begins() -> None:
    assert partition_ddl(datetime(2026, 12, 5, tzinfo=UTC)) == (
        "CREATE TABLE IF NOT EXISTS usage_events_2026_12 PARTITION OF usage_events "
        "FOR VALUES FROM ('2026-12-01T00:00:00+00:00') TO ('2027-01-01T00:00:00+00:00')"
    )
