from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.forecast import Outlook, forecast
from gateway.db.engine import transaction
from gateway.db.tables import limits
from gateway.tenants.records import UnknownTenant
from tests.gateway.billing.report_support import TENANTS, name_tenants, write
from tests.gateway.billing.support import usage_event

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(UTC)


def days(first: date, *charged: int) -> dict[date, int]:
    return {first + timedelta(days=step): amount for step, amount in enumerate(charged) if amount}


def test_weekdays_go_on_as_they_were() -> None:
    # Four weeks of 10 on Mondays to Fridays and 1 at the weekend, until Sunday the 15th; then today, Monday.
    history = days(date(2026, 10, 19), *[10, 10, 10, 10, 10, 1, 1] * 4)
    outlook = Outlook(history | {date(2026, 11, 16): 3}, date(2025, 1, 1), at("2026-11-16T12:00"), BERLIN)
    so_far = sum(amount for day, amount in history.items() if day.month == 11) + 3
    assert (outlook.method, outlook.history_days, outlook.charged) == ("weekdays", 28, so_far)
    # Half of a Monday is left, four days of 10, two of 1, a whole week, and the Monday that is the 30th.
    assert outlook.total == so_far + 5 + 40 + 2 + 52 + 10
    assert outlook.reaches(so_far) == date(2026, 11, 16)
    assert outlook.reaches(so_far - 3) == date(2026, 11, 15)
    assert outlook.reaches(so_far + 16) == date(2026, 11, 18)
    assert outlook.reaches(outlook.total) == date(2026, 11, 30)
    assert outlook.reaches(outlook.total + 1) is None


def test_quiet_days_count_from_the_first_request_on() -> None:
    now = at("2026-11-21T00:00")
    quiet = Outlook({date(2026, 11, 20): 28}, date(2020, 1, 1), now, BERLIN)
    new = Outlook({date(2026, 11, 20): 28}, date(2026, 11, 20), now, BERLIN)
    # One Friday of four, and the 27th is the next; or the only day there is, ten times more.
    assert (quiet.method, quiet.total) == ("weekdays", 28 + 7)
    assert (new.method, new.history_days, new.total) == ("days", 1, 28 + 280)


def test_the_first_day_goes_on_at_its_rate() -> None:
    outlook = Outlook({date(2026, 11, 28): 6}, date(2026, 11, 28), at("2026-11-28T06:00"), BERLIN)
    assert (outlook.method, outlook.history_days, outlook.total) == ("today", 0, 3 * 24)
    assert Outlook({}, None, at("2026-11-28T00:00"), BERLIN).total == 0


def test_a_day_of_25_hours_is_longer() -> None:
    outlook = Outlook({date(2026, 10, 25): 0}, date(2026, 10, 25), at("2026-10-25T12:00"), BERLIN)
    assert outlook.total == 0
    history = days(date(2026, 9, 27), *[0] * 27, 100)
    day = Outlook(history, date(2026, 1, 1), at("2026-10-24T12:00"), BERLIN)
    assert day.history_days == 27 + 1
    # 12 of the 25 hours of Sunday the 25th are left at noon.
    sunday = Outlook({date(2026, 10, 4): 100}, date(2026, 1, 1), at("2026-10-25T12:00"), BERLIN)
    assert sunday.total == 100 + 12


def test_a_half_is_rounded_to_even() -> None:
    # 27 weekdays without, and one Saturday of four; the last Saturday comes with 0.25 or 0.5 of it.
    for amount, total in ((2, 2), (6, 8), (10, 12)):
        outlook = Outlook({date(2026, 11, 7): amount}, date(2026, 1, 1), at("2026-11-28T00:00"), BERLIN)
        assert outlook.total == total


async def test_a_tenants_month_beside_its_budget(engine: AsyncEngine) -> None:
    acme, bolt = TENANTS[:2]
    await name_tenants(engine, {acme: "acme", bolt: "bolt"})
    now = datetime(2024, 6, 11, tzinfo=UTC)
    # Two a day from the 1st on; what comes later, or is another's, does not count.
    moments = [datetime(2024, 6, 1, 6, tzinfo=UTC) + timedelta(hours=12 * step) for step in range(20)]
    events = [usage_event(tenant_id=acme, admitted_at=moment, charged_nano_usd=10**9) for moment in moments]
    await write(engine, [*events, usage_event(tenant_id=acme, admitted_at=now), usage_event(tenant_id=bolt)])
    async with transaction(engine) as connection:
        for window, amount in (("month", 50 * 10**9), ("day", 5)):
            await connection.execute(
                insert(limits).values(
                    id=TENANTS[0] if window == "day" else TENANTS[1],
                    tenant_id=acme,
                    subject="tenant",
                    metric="budget",
                    window=window,
                    amount=amount,
                )
            )
    found = await forecast(engine, str(acme), now)
    assert (found.tenant, found.month, found.charged_usd) == ("acme", "2024-06", "20.000000000")
    assert (found.method, found.history_days, found.forecast_usd) == ("weekdays", 10, "60.000000000")
    assert found.budget is not None
    assert (found.budget.amount_usd, found.budget.remaining_usd) == ("50.000000000", "30.000000000")
    assert (found.budget.excess_usd, found.budget.exhausted_on) == ("10.000000000", date(2024, 6, 25))
    assert (await forecast(engine, "bolt", now)).budget is None
    with pytest.raises(UnknownTenant):
        await forecast(engine, "nobody", now)
