"""Hours, days and months of a time zone as half-open ranges of moments: each begins where the one before ends.

So the parts of a range add up to it by construction, whatever the zone's clocks do: a day has 23, 24 or 25 hours, an
hour that clocks repeat is two hours, and a midnight that they skip is the moment of the change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

Unit = Literal["hour", "day", "month"]
Range = tuple[datetime, datetime]
"""From the first moment on, before the second; UTC."""

_QUARTER = timedelta(minutes=15)
_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)


def midnight(day: date, zone: ZoneInfo) -> datetime:
    """Begin of a local day, in UTC. Of two equal midnights the first; one that clocks skip is the moment they do."""
    # Within a gap fold=0 takes the offset before it, which gives the moment of the change.
    return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)


def month_after(day: date) -> date:
    """First day of the month after the one that ``day`` is in."""
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1)


def month_range(first: date, zone: ZoneInfo) -> Range:
    """The local month that begins on ``first``."""
    return midnight(first, zone), midnight(month_after(first), zone)


def day_range(day: date, zone: ZoneInfo) -> Range:
    return midnight(day, zone), midnight(day + _DAY, zone)


def hour_range(moment: datetime, zone: ZoneInfo) -> Range:
    """The local hour that holds ``moment``."""
    begin, end = slots("hour", moment.astimezone(UTC), moment.astimezone(UTC) + 2 * _HOUR, zone)[:2]
    return begin, end


def slots(unit: Unit, begin: datetime, end: datetime, zone: ZoneInfo) -> list[datetime]:
    """Begins, in UTC, of all hours, days or months that touch ``begin`` <= t < ``end``; the first may lie before."""
    starts: list[datetime] = []
    for start in _candidates(unit, begin, zone):
        if start >= end:
            break
        if not starts or start > starts[-1]:
            starts.append(start)
    return starts[max(0, bisect_right(starts, begin) - 1) :]


def _candidates(unit: Unit, begin: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    if unit == "hour":
        yield from _hours(begin - 2 * _HOUR, zone)
        return
    # A day early: clocks may have been set back across midnight.
    day = begin.astimezone(zone).date() - _DAY
    if unit == "month":
        day = day.replace(day=1)
    while True:
        yield midnight(day, zone)
        day = month_after(day) if unit == "month" else day + _DAY


def _hours(moment: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Clocks change at quarter hours, and in most hours not at all."""
    moment = moment.replace(minute=moment.minute // 15 * 15, second=0, microsecond=0)
    local = moment.astimezone(zone)
    before: tuple[date, int, timedelta | None] | None = None
    while True:
        label = (local.date(), local.hour, local.utcoffset())
        if label != before:
            yield moment
            before = label
        ahead = (moment + _HOUR).astimezone(zone)
        if local.minute == 0 and ahead.utcoffset() == local.utcoffset():
            moment, local = moment + _HOUR, ahead
        else:
            moment += _QUARTER
            local = moment.astimezone(zone)


def label(unit: Unit, start: datetime, zone: ZoneInfo) -> datetime | date | str:
    """What a slot is called: an hour's begin with its offset, a date, ``2026-11``."""
    local = start.astimezone(zone)
    if unit == "hour":
        # As a plain offset: two hours of the same name are told apart, and nothing depends on the zone's data any more.
        fixed = datetime.fromisoformat(local.isoformat())
        return fixed.replace(minute=0, second=0, microsecond=0)
    return local.date() if unit == "day" else f"{local.year:04d}-{local.month:02d}"


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same moments as ranges in order that do not touch."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def common(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The moments that are in both."""
    others = list(others)
    return merged((max(a, c), min(b, d)) for a, b in some for c, d in others)
