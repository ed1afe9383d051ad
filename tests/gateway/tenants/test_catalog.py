from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.prices import PriceBook
from gateway.db.cached import RETRY_S
from gateway.db.engine import DatabaseUnavailable
from gateway.routing.route import Route
from gateway.tenants.audit import Actor
from gateway.tenants.catalog import Catalog, RouteChange, RouteExists, UnknownPool, UnknownRoute
from gateway.tenants.records import ConfigurationError, NotAllowed, VersionConflict
from tests.gateway.billing.support import fetch
from tests.gateway.conftest import price_spec
from tests.gateway.db.support import ManualClock, opened
from tests.ports import free_port

ACTOR = Actor("admin-1")
ROUTE = Route("m", "pool", "backend/m", 8192, 512, 4096, 300.0)


@pytest.fixture
async def catalog(engine: AsyncEngine, clock: ManualClock) -> Catalog:
    catalog = Catalog(engine, clock)
    await catalog.create_pool(ACTOR, "pool")
    await catalog.create_route(ACTOR, ROUTE)
    return catalog


async def _audited(engine: AsyncEngine) -> list[tuple[Any, ...]]:
    rows = await fetch(engine, "SELECT actor, action, kind, target, before, after FROM audit_log ORDER BY id")
    return [tuple(row.values()) for row in rows]


async def test_a_route_reads_back_as_declared(catalog: Catalog) -> None:
    assert await catalog.route("m") == ROUTE
    assert await catalog.route("n") is None
    serving = replace(ROUTE, name="a", unpriced="serve", tokenizer="o200k_base")
    assert await catalog.create_route(ACTOR, replace(serving, version=7)) == serving
    assert await catalog.routes() == [serving, ROUTE]
    assert await catalog.stored_route("a") == serving
    assert [route.name for route in await catalog.list_routes(limit=1)] == ["a"]
    assert await catalog.list_routes(after="a") == [ROUTE]
    assert await catalog.pools() == ["pool"]
    with pytest.raises(RouteExists):
        await catalog.create_route(ACTOR, ROUTE)


async def test_a_pool_declared_again_stays(catalog: Catalog, engine: AsyncEngine) -> None:
    assert not await catalog.create_pool(ACTOR, "pool")
    assert await catalog.create_pool(ACTOR, "other")
    assert [entry[1:4] for entry in await _audited(engine)] == [
        ("create", "pool", "pool"),
        ("create", "route", "m"),
        ("create", "pool", "other"),
    ]


async def test_a_change_raises_the_version_and_is_audited_with_what_it_changed(
    catalog: Catalog, engine: AsyncEngine
) -> None:
    changed = await catalog.update_route(ACTOR, "m", RouteChange(timeout_s=1.5, tokenizer="backend"), if_version=1)
    assert changed == replace(ROUTE, timeout_s=1.5, tokenizer="backend", version=2)
    assert await catalog.routes() == [changed]
    # What changes nothing is no change.
    assert await catalog.update_route(ACTOR, "m", RouteChange(timeout_s=1.5)) == changed
    with pytest.raises(VersionConflict):
        await catalog.update_route(ACTOR, "m", RouteChange(timeout_s=2.0), if_version=1)
    assert (await catalog.update_route(ACTOR, "m", RouteChange(tokenizer=None))).tokenizer is None
    assert (await _audited(engine))[2:] == [
        (
            "admin-1",
            "update",
            "route",
            "m",
            {"timeout_s": 300.0, "tokenizer": None, "version": 1},
            {"timeout_s": 1.5, "tokenizer": "backend", "version": 2},
        ),
        ("admin-1", "update", "route", "m", {"tokenizer": "backend", "version": 2}, {"tokenizer": None, "version": 3}),
    ]


async def test_changes_at_once_are_made_one_after_the_other(catalog: Catalog) -> None:
    changes = (catalog.update_route(ACTOR, "m", RouteChange(timeout_s=1.0 + n), if_version=1) for n in range(5))
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Route"] + ["VersionConflict"] * 4


async def test_deleted_is_gone_but_its_prices_stay(catalog: Catalog, engine: AsyncEngine, clock: ManualClock) -> None:
    price = await PriceBook(engine, clock).set_price(ACTOR, price_spec("m", "1", "2"))
    with pytest.raises(ConfigurationError, match="routes use"):
        await catalog.delete_pool(ACTOR, "pool")
    with pytest.raises(VersionConflict):
        await catalog.delete_route(ACTOR, "m", if_version=2)
    await catalog.delete_route(ACTOR, "m", if_version=1)
    assert await catalog.route("m") is None
    for gone in (catalog.delete_route(ACTOR, "m"), catalog.update_route(ACTOR, "m", RouteChange(timeout_s=1.0))):
        with pytest.raises(UnknownRoute):
            await gone
    assert await PriceBook(engine, clock).prices("m") == [price]
    await catalog.delete_pool(ACTOR, "pool")
    with pytest.raises(UnknownPool):
        await catalog.delete_pool(ACTOR, "pool")
    assert await catalog.pools() == []
    assert [entry[1:4] for entry in await _audited(engine)][-2:] == [
        ("delete", "route", "m"),
        ("delete", "pool", "pool"),
    ]


async def test_routes_that_make_no_sense_are_refused(catalog: Catalog) -> None:
    changes: list[dict[str, Any]] = [
        {"pool": "nowhere"},
        {"pool": "\x00"},
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
        {"tokenizer": "O200K base"},
        {"tokenizer": ""},
    ]
    for change in changes:
        with pytest.raises(ConfigurationError):
            await catalog.create_route(ACTOR, replace(ROUTE, name="other", **change))
        with pytest.raises(ConfigurationError):
            await catalog.update_route(ACTOR, "m", RouteChange(**change))
    for name in ("", "a b", "\x00", "\ud800"):
        with pytest.raises(ConfigurationError):
            await catalog.create_route(ACTOR, replace(ROUTE, name=name))
        with pytest.raises(UnknownRoute):
            await catalog.stored_route(name)
    assert await catalog.routes() == [ROUTE]


async def test_a_viewer_changes_nothing(catalog: Catalog, engine: AsyncEngine, clock: ManualClock) -> None:
    viewer = Actor("admin-2", "viewer")
    before = await _audited(engine)
    for change in (
        catalog.create_pool(viewer, "other"),
        catalog.delete_pool(viewer, "pool"),
        catalog.create_route(viewer, replace(ROUTE, name="other")),
        catalog.update_route(viewer, "m", RouteChange(timeout_s=1.0)),
        catalog.delete_route(viewer, "m"),
        PriceBook(engine, clock).set_price(viewer, price_spec("m", "1", "2")),
    ):
        with pytest.raises(NotAllowed):
            await change
    assert await _audited(engine) == before


async def test_changes_elsewhere_are_seen_within_the_cache_time(
    catalog: Catalog, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = Catalog(engine, clock, cache_s=5.0)
    assert await other.route("m") == ROUTE
    changed = await catalog.update_route(ACTOR, "m", RouteChange(timeout_s=7.0))
    clock.advance(4.9)
    assert await other.route("m") == ROUTE
    clock.advance(0.1)
    assert await other.route("m") == changed


async def test_the_last_copy_serves_while_postgres_is_away(
    catalog: Catalog, engine: AsyncEngine, clock: ManualClock
) -> None:
    await catalog.routes()
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        catalog._engine = gone
        clock.advance(100)
        assert await catalog.route("m") == ROUTE
        catalog._engine = engine
        changed = await Catalog(engine, clock).update_route(ACTOR, "m", RouteChange(timeout_s=7.0))
        # Not asked for again at once, or every request would wait for a server that hangs.
        assert await catalog.route("m") == ROUTE
        clock.advance(RETRY_S)
        assert await catalog.route("m") == changed


async def test_without_a_copy_a_crowd_fails_together(clock: ManualClock) -> None:
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone", pool_size=1) as gone:
        catalog = Catalog(gone, clock)
        outcomes = await asyncio.gather(*(catalog.route("m") for _ in range(20)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DatabaseUnavailable}
