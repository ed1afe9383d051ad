from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.usage import TokenUsage
from gateway.db.engine import DatabaseUnavailable
from gateway.local.services import free_port
from gateway.routing.route import Route
from gateway.tenants.catalog import RETRY_S, Catalog, parse_price
from gateway.tenants.records import ConfigurationError
from tests.gateway.db.support import ManualClock, opened

ROUTE = Route("m", "pool", "backend/m", 8192, 512, 4096, 300.0)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def catalog(engine: AsyncEngine, clock: ManualClock) -> Catalog:
    catalog = Catalog(engine, clock)
    await catalog.create_pool("pool")
    await catalog.create_route(ROUTE)
    return catalog


async def test_a_route_reads_back_as_declared(catalog: Catalog) -> None:
    assert await catalog.route("m") == ROUTE
    assert await catalog.route("n") is None
    serving = replace(ROUTE, name="a", unpriced="serve")
    await catalog.create_route(serving)
    assert await catalog.routes() == [serving, ROUTE]
    assert await catalog.pools() == ["pool"]


async def test_declaring_again_changes_a_route_and_leaves_a_pool(catalog: Catalog) -> None:
    await catalog.create_pool("pool")
    changed = replace(ROUTE, max_output_tokens=1024, timeout_s=1.5)
    await catalog.create_route(changed)
    assert await catalog.routes() == [changed]


async def test_routes_that_make_no_sense_are_refused(catalog: Catalog) -> None:
    changes: list[dict[str, Any]] = [
        {"name": ""},
        {"name": "a b"},
        {"pool": "nowhere"},
        {"backend_model": "m\x00"},
        {"context_length": 0},
        {"context_length": 2**31},
        {"default_output_tokens": 0},
        {"default_output_tokens": 4097},
        {"max_output_tokens": -1},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": 3601.0},
        {"unpriced": "free"},
    ]
    for change in changes:
        with pytest.raises(ConfigurationError):
            await catalog.create_route(replace(ROUTE, **change))
    assert await catalog.routes() == [ROUTE]


async def test_the_price_in_force_is_the_latest_that_has_begun(catalog: Catalog) -> None:
    later = BEGIN + timedelta(days=10)
    assert await catalog.price("m", BEGIN) is None
    second = await catalog.set_price("m", "3", "4", effective_from=later)
    first = await catalog.set_price("m", "0.10", "0.40", effective_from=BEGIN)
    tick = timedelta(microseconds=1)
    assert await catalog.price("m", BEGIN - tick) is None
    assert await catalog.price("m", BEGIN) == first
    assert await catalog.price("m", later - tick) == first
    assert await catalog.price("m", later) == second
    assert await catalog.price("m", later + timedelta(days=1000)) == second
    assert await catalog.price("n", later) is None
    assert await catalog.prices("m") == [first, second]


async def test_a_price_holds_its_moment_in_any_zone(catalog: Catalog) -> None:
    local = datetime.fromisoformat("2026-06-01T00:00:00+02:00")
    price = await catalog.set_price("m", "1", "2", effective_from=local)
    assert await catalog.price("m", datetime(2026, 5, 31, 22, tzinfo=UTC)) == price
    assert await catalog.price("m", datetime(2026, 5, 31, 21, 59, tzinfo=UTC)) is None


async def test_a_price_is_kept_to_the_last_place(catalog: Catalog) -> None:
    await catalog.set_price("m", "0.123456789", "9999.999999999", effective_from=BEGIN)
    price = await catalog.price("m", BEGIN)
    assert price is not None
    assert (price.input_usd_per_mtok, price.output_usd_per_mtok) == (Decimal("0.123456789"), Decimal("9999.999999999"))
    assert price.amount(TokenUsage(1_000_000, 1_000_000)) == 123_456_789 + 9_999_999_999_999


async def test_free_is_a_price(catalog: Catalog) -> None:
    await catalog.set_price("m", 0, 0, effective_from=BEGIN)
    price = await catalog.price("m", BEGIN)
    assert price is not None
    assert price.amount(TokenUsage(5, 5)) == 0


async def test_a_price_once_set_does_not_change(catalog: Catalog) -> None:
    first = await catalog.set_price("m", "1", "2", effective_from=BEGIN)
    with pytest.raises(ConfigurationError, match="already"):
        await catalog.set_price("m", "3", "4", effective_from=BEGIN)
    assert await catalog.prices("m") == [first]


async def test_prices_need_a_route_and_a_zone(catalog: Catalog) -> None:
    for name in ("n", "", "\x00", "\ud800"):
        with pytest.raises(ConfigurationError, match="no route"):
            await catalog.set_price(name, "1", "2")
    with pytest.raises(ConfigurationError, match="time zone"):
        await catalog.set_price("m", "1", "2", effective_from=datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    "value", ["", "x", "NaN", "-1", "Infinity", "0.000003", "3e-06", "10001", "1e30", "0.1234567891"]
)
def test_absurd_prices_are_refused(value: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_price(value)


@given(st.decimals("0.0001", "10000", places=9))
def test_prices_are_read_exactly(price: Decimal) -> None:
    assert parse_price(str(price)) == price


@given(st.text(max_size=60))
def test_any_text_is_a_price_or_a_clear_error(text: str) -> None:
    try:
        price = parse_price(text)
    except ConfigurationError:
        return
    assert 0 <= price <= 10_000


async def test_changes_elsewhere_are_seen_within_the_cache_time(
    catalog: Catalog, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = Catalog(engine, clock, cache_s=5.0)
    assert await other.price("m", clock.now()) is None
    price = await catalog.set_price("m", "1", "2")
    clock.advance(4.9)
    assert await other.price("m", clock.now()) is None
    clock.advance(0.1)
    assert await other.price("m", clock.now()) == price


async def test_the_last_copy_serves_while_postgres_is_away(
    catalog: Catalog, engine: AsyncEngine, clock: ManualClock
) -> None:
    await catalog.routes()
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        catalog._engine = gone
        clock.advance(100)
        assert await catalog.route("m") == ROUTE
        catalog._engine = engine
        await Catalog(engine, clock).create_route(replace(ROUTE, timeout_s=7.0))
        # Not asked for again at once, or every request would wait for a server that hangs.
        assert await catalog.route("m") == ROUTE
        clock.advance(RETRY_S)
        assert await catalog.route("m") == replace(ROUTE, timeout_s=7.0)


async def test_without_a_copy_a_crowd_fails_together(clock: ManualClock) -> None:
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone", pool_size=1) as gone:
        catalog = Catalog(gone, clock)
        outcomes = await asyncio.gather(*(catalog.route("m") for _ in range(20)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DatabaseUnavailable}
