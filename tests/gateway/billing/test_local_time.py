from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.local_time import Range, Unit, common, day_range, hour_range, label, merged, month_range, slots

ZONES = ["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/St_Johns", "Australia/Lord_Howe", "Pacific/Chatham"]
ZONES += ["America/Havana", "Africa/Cairo", "Asia/Beirut", "Pacific/Apia", "America/Sao_Paulo", "Asia/Kolkata"]
EPOCH = datetime(1990, 1, 1, tzinfo=UTC)
MOMENTS = st.integers(0, 60 * 365 * 24 * 4).map(lambda quarters: EPOCH + timedelta(minutes=15 * quarters))
UNITS: list[Unit] = ["hour", "day", "month"]


@given(st.sampled_from(ZONES), st.sampled_from(UNITS), MOMENTS, st.integers(1, 96 * 3))
def test_slots_cover_a_range_without_gap_or_overlap(zone: str, unit: Unit, begin: datetime, quarters: int) -> None:
    local, end = ZoneInfo(zone), begin + timedelta(minutes=15 * quarters)
    starts = slots(unit, begin, end, local)
    assert starts[0] <= begin
    assert all(before < after < end for before, after in pairwise(starts))
    names = [label(unit, start, local) for start in starts]
    assert len(set(names)) == len(names)
    # Wherever a range begins, the slots are the same.
    later = slots(unit, starts[-1], end, local)
    assert later == starts[-1:]


@given(st.sampled_from([zone for zone in ZONES if zone != "America/St_Johns"]), MOMENTS)
def test_a_moment_is_in_the_slots_of_its_local_time(zone: str, moment: datetime) -> None:
    """But for Newfoundland, whose clocks were set back across midnight until 2011."""
    local = ZoneInfo(zone)
    there = moment.astimezone(local)
    for unit, name in (("day", there.date()), ("month", f"{there:%Y-%m}")):
        (start,) = slots(unit, moment, moment + timedelta(microseconds=1), local)  # type: ignore[arg-type]
        assert label(unit, start, local) == name  # type: ignore[arg-type]
    begin, end = hour_range(moment, local)
    assert begin <= moment < end
    told = label("hour", begin, local)
    assert isinstance(told, datetime)
    assert (told.hour, told.date(), told.utcoffset()) == (there.hour, there.date(), there.utcoffset())


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", date(2026, 3, 29), 23),
        ("Europe/Berlin", date(2026, 10, 25), 25),
        ("Europe/Berlin", date(2026, 6, 1), 24),
        ("Australia/Lord_Howe", date(2026, 4, 5), 24.5),
        # Clocks go from midnight to one o'clock, and from midnight to eleven o'clock the evening before.
        ("Africa/Cairo", date(2026, 4, 24), 23),
        ("Africa/Cairo", date(2026, 10, 29), 25),
        # It has midnight twice.
        ("America/Havana", date(2026, 11, 1), 25),
        # A day that never was.
        ("Pacific/Apia", date(2011, 12, 30), 0),
    ],
)
def test_days_are_as_long_as_their_clocks_make_them(zone: str, day: date, hours: float) -> None:
    begin, end = day_range(day, ZoneInfo(zone))
    assert (end - begin) / timedelta(hours=1) == hours
    if hours:
        assert slots("day", begin, end, ZoneInfo(zone)) == [begin]
        hourly = slots("hour", begin, end, ZoneInfo(zone))
        assert hourly[0] == begin


def test_the_days_of_a_month_add_up_to_it() -> None:
    zone = ZoneInfo("Europe/Berlin")
    begin, end = month_range(date(2026, 10, 1), zone)
    days = slots("day", begin, end, zone)
    assert (len(days), days[0], end - begin) == (31, begin, timedelta(days=31, hours=1))
    assert slots("month", begin, end, zone) == [begin]
    assert label("month", begin, zone) == "2026-10"


HOUR = timedelta(hours=1)
Intervals = list[tuple[int, int]]
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(INTERVALS, INTERVALS)
def test_ranges_are_merged_and_cut_as_sets_of_moments(some: Intervals, others: Intervals) -> None:
    def ranges(given: Intervals) -> list[Range]:
        return [(EPOCH + a * HOUR, EPOCH + b * HOUR) for a, b in given]

    def hours(found: list[Range]) -> set[int]:
        return {hour for a, b in found for hour in range((a - EPOCH) // HOUR, (b - EPOCH) // HOUR)}

    one, other = merged(ranges(some)), merged(ranges(others))
    assert hours(one) == hours(ranges(some))
    assert all(before[1] < after[0] for before, after in pairwise(one))
    assert hours(common(one, other)) == hours(one) & hours(other)
