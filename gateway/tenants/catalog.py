"""The catalogue: pools, routes and their prices. Read on each request from a copy that is a few seconds old at most."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation

import structlog
from sqlalchemy import insert, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.usage import Price
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import pools, prices, routes
from gateway.ids import uuid7
from gateway.routing.route import Route
from gateway.tenants.principal import LONGEST_REQUEST_S
from gateway.tenants.records import ConfigurationError, check_name, is_name

RETRY_S = 1.0
"""While Postgres is away and an old copy serves, how often a new one is asked for."""
_MIN_PRICE = Decimal("0.0001")
_MAX_PRICE = Decimal(10_000)
_MAX_TOKENS = 100_000_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    routes: dict[str, Route] = field(default_factory=dict)
    prices: dict[str, list[Price]] = field(default_factory=dict)
    """By route; oldest first."""


class Catalog:
    """Routes and prices. Changes reach other replicas within ``cache_s``; with Postgres away the last copy serves."""

    def __init__(self, engine: AsyncEngine, clock: Clock, *, cache_s: float = 5.0) -> None:
        self._engine = engine
        self._clock = clock
        self._cache_s = cache_s
        self._snapshot: _Snapshot | None = None
        self._good_until = float("-inf")
        self._refreshing = asyncio.Lock()

    async def route(self, name: str) -> Route | None:
        """None: there is no such route. Raises DatabaseUnavailable if no copy was ever read."""
        return (await self._current()).routes.get(name)

    async def routes(self) -> list[Route]:
        """All, by name. Raises as ``route``."""
        return list((await self._current()).routes.values())

    async def price(self, route_name: str, at: datetime) -> Price | None:
        """The price in force at ``at``; None: unpriced then. Raises as ``route``."""
        versions = (await self._current()).prices.get(route_name, [])
        index = bisect_right(versions, at, key=lambda price: price.effective_from)
        return versions[index - 1] if index else None

    async def prices(self, route_name: str) -> list[Price]:
        """Every price a route had, has or will have, oldest first. Raises as ``route``."""
        return list((await self._current()).prices.get(route_name, []))

    async def pools(self) -> list[str]:
        """Names of the declared pools, as Postgres has them now. Raises DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            return list(await connection.scalars(select(pools.c.name).order_by(pools.c.name)))

    async def create_pool(self, name: str) -> None:
        """Declare a pool of backends; one that is declared stays as it is. Raises ConfigurationError."""
        async with transaction(self._engine) as connection:
            await connection.execute(upsert(pools).values(name=check_name("pool", name)).on_conflict_do_nothing())

    async def create_route(self, route: Route) -> None:
        """Declare a route; one of the same name is replaced. Raises ConfigurationError."""
        _check_route(route)
        values = {
            "pool": route.pool,
            "backend_model": route.backend_model,
            "context_length": route.context_length,
            "default_output_tokens": route.default_output_tokens,
            "max_output_tokens": route.max_output_tokens,
            "timeout_s": route.timeout_s,
            "unpriced": route.unpriced,
        }
        query = (
            upsert(routes)
            .values(name=route.name, **values)
            .on_conflict_do_update(index_elements=[routes.c.name], set_=values)
        )
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(query)
        except IntegrityError as fault:
            raise ConfigurationError(
                f"there is no pool {route.pool!r}; declare it first: penstock pool set {route.pool}"
            ) from fault
        self._expire()

    async def set_price(
        self,
        route_name: str,
        input_usd_per_mtok: Decimal | int | str,
        output_usd_per_mtok: Decimal | int | str,
        *,
        effective_from: datetime | None = None,
    ) -> Price:
        """Give a route a price in USD per million tokens, in force from ``effective_from`` (now, if not given) on.

        A price never changes once it is set, and rows already written keep the one they were charged by.
        Raises ConfigurationError.
        """
        begin = effective_from or self._clock.now()
        if begin.tzinfo is None:
            raise ConfigurationError("the begin of a price needs a time zone: write 2027-01-01T00:00:00Z")
        price = Price(
            uuid7(), route_name, parse_price(input_usd_per_mtok), parse_price(output_usd_per_mtok), effective_from=begin
        )
        query = insert(prices).values(
            id=price.id,
            route=price.route,
            input_usd_per_mtok=price.input_usd_per_mtok,
            output_usd_per_mtok=price.output_usd_per_mtok,
            effective_from=price.effective_from,
        )
        try:
            async with transaction(self._engine) as connection:
                known = is_name(route_name) and await connection.scalar(
                    select(routes.c.name).where(routes.c.name == route_name)
                )
                if not known:
                    raise ConfigurationError(f"there is no route {route_name!r}; `penstock route list` shows them")
                await connection.execute(query)
        except IntegrityError as fault:
            raise ConfigurationError(
                f"route {route_name!r} has a price from {begin.isoformat()} on already; choose another begin"
            ) from fault
        self._expire()
        return price

    def _expire(self) -> None:
        self._good_until = float("-inf")

    async def _current(self) -> _Snapshot:
        if self._snapshot is not None and self._clock.monotonic() < self._good_until:
            return self._snapshot
        async with self._refreshing:
            began = self._clock.monotonic()
            if began < self._good_until:
                return self._last_copy()
            try:
                self._snapshot = await self._read()
                self._good_until = began + self._cache_s
            except DatabaseUnavailable as fault:
                _log.warning("catalog_not_refreshed", error=str(fault))
                # Whoever waited here meanwhile must not wait for Postgres once more, each in turn.
                self._good_until = self._clock.monotonic() + RETRY_S
            return self._last_copy()

    def _last_copy(self) -> _Snapshot:
        if self._snapshot is None:
            raise DatabaseUnavailable("the database does not answer; try again shortly")
        return self._snapshot

    async def _read(self) -> _Snapshot:
        snapshot = _Snapshot()
        async with transaction(self._engine) as connection:
            for row in await connection.execute(select(routes).order_by(routes.c.name)):
                snapshot.routes[row.name] = Route(
                    row.name,
                    row.pool,
                    row.backend_model,
                    row.context_length,
                    row.default_output_tokens,
                    row.max_output_tokens,
                    row.timeout_s,
                    row.unpriced,
                )
            for row in await connection.execute(select(prices).order_by(prices.c.route, prices.c.effective_from)):
                price = Price(row.id, row.route, row.input_usd_per_mtok, row.output_usd_per_mtok, row.effective_from)
                snapshot.prices.setdefault(row.route, []).append(price)
        return snapshot


def parse_price(value: Decimal | int | str) -> Decimal:
    """USD per million tokens, exactly. Raises ConfigurationError for what is no price or cannot be meant.

    Free is 0. A price below 0.0001 is refused: it is one per token, taken for one per million.
    """
    try:
        price = Decimal(value)
    except InvalidOperation:
        raise ConfigurationError(f"{str(value)[:50]!r} is not a price; write USD per million tokens, as 0.15") from None
    if not price.is_finite() or not (price == 0 or _MIN_PRICE <= price <= _MAX_PRICE):
        raise ConfigurationError(
            f"a price of {str(value)[:50]} USD per million tokens is out of range: use 0, or {_MIN_PRICE} to "
            f"{_MAX_PRICE} (prices are per million tokens, not per token or thousand)"
        )
    if price != round(price, 9):
        raise ConfigurationError("a price has at most 9 decimal places")
    return price


def _check_route(route: Route) -> None:
    check_name("route", route.name)
    check_name("model", route.backend_model)
    check_name("pool", route.pool)
    for name in ("context_length", "default_output_tokens", "max_output_tokens"):
        value = getattr(route, name)
        if not 1 <= value <= _MAX_TOKENS:
            raise ConfigurationError(f"{name} must be between 1 and {_MAX_TOKENS} tokens, not {value}")
    if route.default_output_tokens > route.max_output_tokens:
        raise ConfigurationError("default_output_tokens must not be above max_output_tokens")
    if not 0 < route.timeout_s <= LONGEST_REQUEST_S:
        raise ConfigurationError(f"timeout_s must be above 0 and at most {LONGEST_REQUEST_S:.0f} seconds")
    if route.unpriced not in ("refuse", "serve"):
        raise ConfigurationError("unpriced must be `refuse` or `serve`")
