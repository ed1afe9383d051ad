"""Budget periods: half-open ranges of time that begin and end at local midnight of the tenant's zone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from gateway.tenants.principal import BudgetPeriod

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_EVER = (EPOCH, datetime(9999, 12, 31, tzinfo=UTC))


@dataclass(frozen=True, slots=True)
class Period:
    """``start`` <= t < ``end``, in UTC."""

    kind: BudgetPeriod
    start: datetime
    end: datetime

    def holds(self, at: datetime) -> bool:
        return self.start <= at < self.end


def period_at(kind: BudgetPeriod, timezone: str, at: datetime) -> Period:
    """The period that holds ``at``. Weeks begin on Monday. Raises ZoneInfoNotFoundError for an unknown zone.

    A midnight that a clock change skips is the moment of the change; one that comes twice is the first.
    """
    if kind == "total":
        return Period("total", *_EVER)
    zone = ZoneInfo(timezone)
    first, after = _days(kind, at.astimezone(zone).date())
    return Period(kind, _midnight(first, zone), _midnight(after, zone))


def _days(kind: BudgetPeriod, day: date) -> tuple[date, date]:
    """First day of the period that holds ``day``, and the first day after it."""
    if kind == "day":
        return day, day + timedelta(days=1)
    if kind == "week":
        first = day - timedelta(days=day.weekday())
        return first, first + timedelta(days=7)
    first = day.replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    # fold=0: the first of two equal times; within a gap the offset before it, which gives the moment of the change.
    return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)


def to_ms(at: datetime) -> int:
    """Milliseconds since 1970, as Redis' scripts count time."""
    return (at - EPOCH) // _MS


def from_ms(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)
