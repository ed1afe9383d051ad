from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.tariff import Price, Schedule

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TENANT = UUID(int=11)


def at(hour: int) -> datetime:
    return BEGIN + timedelta(hours=hour)


@st.composite
def versions(draw: st.DrawFn, tenant_id: UUID | None = None) -> list[Price]:
    """Of one price, oldest first; some end before the next begins, or never."""
    begins = sorted(draw(st.sets(st.integers(0, 20), max_size=4)))
    found = []
    for number, begin in enumerate(begins):
        lasts = draw(st.none() | st.integers(1, 12))
        end = None if lasts is None else at(begin + lasts)
        one = Price(UUID(int=number), "m", Decimal(1), Decimal(2), at(begin), effective_until=end, tenant_id=tenant_id)
        found.append(one)
    return found


@given(versions(TENANT), versions(), versions(), st.lists(st.integers(-1, 34), min_size=1, max_size=12))
def test_a_tariff_does_not_depend_on_what_was_asked_before(
    own: list[Price], listed: list[Price], cost: list[Price], hours: list[int]
) -> None:
    schedule = Schedule(own, listed, cost, 200)
    for hour in hours:
        fresh = Schedule(own, listed, cost, 200).at(at(hour))
        assert schedule.at(at(hour)) == fresh
        assert fresh.charge is None or fresh.charge.effective_from <= at(hour)


def test_the_same_tariff_serves_while_nothing_changes() -> None:
    price = Price(UUID(int=1), "m", Decimal(1), Decimal(2), BEGIN, effective_until=at(5))
    schedule = Schedule((), (price,), (), 0)
    assert schedule.at(at(1)) is schedule.at(at(4))
    assert schedule.at(at(4)).charge is price
    assert schedule.at(at(5)).charge is None
