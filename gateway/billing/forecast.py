"""What a tenant will have been charged by the end of its month, and whether its budget lasts.

The method is plain, so that its readers can judge it. Each day that is left is expected to cost what the same weekday
cost on average over the last 28 whole days; a weekday of which there is none yet, what a day cost on average; what is
left of today, its share of that. A tenant's history begins with its first request. If that was today, the rate since
midnight goes on. Everything is reckoned in fractions and rounded once, half to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.local_time import day_range, midnight, month_range
from gateway.billing.report_query import UsageQuery
from gateway.billing.reports import reading, usage_report
from gateway.billing.usage import usd_text
from gateway.db.tables import limits, usage_rollup
from gateway.tenants.changes import find_tenant

HISTORY_DAYS = 28
_DAY = timedelta(days=1)
Method = Literal["weekdays", "days", "today"]


class BudgetOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant's own budget per month beside the forecast."""

    amount_nano_usd: int
    amount_usd: str
    hard: bool
    """Requests are refused when it is spent; then the forecast is what would be asked for."""
    remaining_nano_usd: int
    """Of the amount, after what was charged so far; negative: over it."""
    remaining_usd: str
    excess_nano_usd: int
    """By how much the forecast exceeds the amount; 0: it does not."""
    excess_usd: str
    exhausted_on: date | None
    """Day on which it is, or is expected to be, spent; null: not in this month."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    month: str
    timezone: str
    as_of: datetime
    charged_nano_usd: int
    """So far this month."""
    charged_usd: str
    forecast_nano_usd: int
    """For the whole month."""
    forecast_usd: str
    method: Method
    """``weekdays``: means of each weekday; ``days``: the mean of all days where a weekday has no history yet;
    ``today``: the rate of today, for there is no whole day yet."""
    history_days: int
    """Whole days that the means are of; 28 at most."""
    budget: BudgetOutlook | None
    """Null: the tenant has none per month."""


async def forecast(engine: AsyncEngine, tenant: str, now: datetime) -> Forecast:
    """``tenant``: name or id. Raises UnknownTenant, DatabaseUnavailable."""
    async with reading(engine, None) as connection:
        record = await find_tenant(connection, tenant)
        budget = (
            await connection.execute(
                select(limits.c.amount, limits.c.hard).where(
                    limits.c.tenant_id == record.id,
                    limits.c.subject == "tenant",
                    limits.c.metric == "budget",
                    limits.c.window == "month",
                )
            )
        ).one_or_none()
        bucket = usage_rollup.c.bucket
        first = await connection.scalar(select(func.min(bucket)).where(usage_rollup.c.tenant_id == record.id))
    zone = ZoneInfo(record.timezone)
    today = now.astimezone(zone).date()
    begin = min(midnight(today.replace(day=1), zone), midnight(today - HISTORY_DAYS * _DAY, zone))
    days: dict[date, int] = {}
    if begin < now:
        query = UsageQuery(tenant=[str(record.id)], start=begin, end=now, timezone=record.timezone, group_by=["day"])
        for row in (await usage_report(engine, query)).rows:
            assert isinstance(row.day, date)
            days[row.day] = row.charged_nano_usd
    outlook = Outlook(days, None if first is None else first.astimezone(zone).date(), now, zone)
    return Forecast(
        tenant=record.name,
        month=f"{today:%Y-%m}",
        timezone=record.timezone,
        as_of=now.astimezone(UTC),
        charged_nano_usd=outlook.charged,
        charged_usd=usd_text(outlook.charged),
        forecast_nano_usd=outlook.total,
        forecast_usd=usd_text(outlook.total),
        method=outlook.method,
        history_days=outlook.history_days,
        budget=None if budget is None else _beside(outlook, budget.amount, budget.hard),
    )


def _beside(outlook: Outlook, amount: int, hard: bool) -> BudgetOutlook:
    excess = max(0, outlook.total - amount)
    return BudgetOutlook(
        amount_nano_usd=amount,
        amount_usd=usd_text(amount),
        hard=hard,
        remaining_nano_usd=amount - outlook.charged,
        remaining_usd=usd_text(amount - outlook.charged),
        excess_nano_usd=excess,
        excess_usd=usd_text(excess),
        exhausted_on=outlook.reaches(amount),
    )


class Outlook:
    """The reckoning itself. ``days``: nano-USD charged, by local day; days without requests are left out.

    ``first``: the day of the tenant's first request; None: it has made none.
    """

    def __init__(self, days: Mapping[date, int], first: date | None, now: datetime, zone: ZoneInfo) -> None:
        self._days = days
        self._today = now.astimezone(zone).date()
        _, self._end = month_range(self._today.replace(day=1), zone)
        begin, end = day_range(self._today, zone)
        self._left_of_today = Fraction(
            (end - now) // timedelta(microseconds=1), (end - begin) // timedelta(microseconds=1)
        )
        since = max(first or self._today, self._today - HISTORY_DAYS * _DAY)
        self._history = [since + step * _DAY for step in range((self._today - since).days)]
        self.history_days = len(self._history)
        self.method: Method = "weekdays" if len(self._history) >= 7 else "days" if self._history else "today"
        self._last = self._end.astimezone(zone).date() - _DAY
        self._month = [day for day in days if (day.year, day.month) == (self._today.year, self._today.month)]
        self.charged = sum(days[day] for day in self._month)
        self.total = round(self.charged + sum(map(self._expected, self._days_left()), Fraction(0)))

    def reaches(self, amount: int) -> date | None:
        """The day on which so much is charged, or expected to be; None: not this month."""
        spent = Fraction(0)
        for step in range(self._last.day):
            day = self._last.replace(day=1) + step * _DAY
            spent += self._days.get(day, 0) + (self._expected(day) if day >= self._today else 0)
            if spent >= amount:
                return day
        return None

    def _days_left(self) -> list[date]:
        return [self._today + step * _DAY for step in range((self._last - self._today).days + 1)]

    def _expected(self, day: date) -> Fraction:
        """What is still to come of a day."""
        if not self._history:
            gone = 1 - self._left_of_today
            whole = Fraction(self._days.get(self._today, 0)) / gone if gone else Fraction(0)
        else:
            alike = [past for past in self._history if past.weekday() == day.weekday()] or self._history
            whole = Fraction(sum(self._days.get(past, 0) for past in alike), len(alike))
        return whole * self._left_of_today if day == self._today else whole
