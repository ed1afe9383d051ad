"""The price book: every version of every price, read on each request from a copy that is a few seconds old at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import insert, or_, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.billing.genai_import import HostedPrice, hosted_price
from gateway.billing.price_spec import LATEST, RATES, Basis, PriceSpec, checked
from gateway.billing.tariff import Price, Schedule, Tariff, in_force
from gateway.clock import Clock
from gateway.db.cached import CachedCopy
from gateway.db.engine import transaction
from gateway.db.tables import prices, routes, tenants
from gateway.ids import uuid7
from gateway.tenants.audit import Actor, audit
from gateway.tenants.catalog import UnknownRoute
from gateway.tenants.changes import check_version
from gateway.tenants.principal import Principal
from gateway.tenants.records import (
    AlreadyExists,
    ConfigurationError,
    StateConflict,
    Unknown,
    UnknownTenant,
    as_id,
    is_name,
)

__all__ = ["Price", "PriceBook", "Tariff", "UnknownPrice", "price_version"]


class UnknownPrice(Unknown):
    def __init__(self, price_id: UUID) -> None:
        super().__init__(f"there is no price {price_id}; `penstock price list ROUTE` shows those there are")


_FIELDS = tuple(field.name for field in fields(Price) if field.init)
_Key = tuple[str, UUID | None, Basis]
_Versions = dict[_Key, list[Price]]
"""By route, tenant (None: all) and basis; oldest first."""
_MOST_SCHEDULES = 10_000
_MARK = text(
    "SELECT count(*) || '/' || coalesce(sum(hashtextextended(concat(id, effective_until), 0)::numeric), 0) FROM prices"
)
"""Differs whenever a price was set or ended. Reading ten thousand prices holds up a gateway; this does not."""


class PriceBook:
    """Prices. Changes reach other replicas within ``cache_s``; with Postgres away the last copy serves."""

    def __init__(self, engine: AsyncEngine, clock: Clock, *, cache_s: float = 5.0) -> None:
        self._engine = engine
        self._clock = clock
        self._last: tuple[Any, _Versions] | None = None
        self._copy = CachedCopy("prices", self._read, clock, cache_s=cache_s)
        self._scheduled: _Versions = {}
        self._schedules: dict[tuple[str, UUID, int], Callable[[datetime], Tariff]] = {}
        """Made from ``_scheduled``."""

    async def tariff(self, route: str, principal: Principal, at: datetime) -> Tariff:
        """What the tenant pays at ``at``: its own price, else the list price with its mark-up.

        It costs us the cost price, else the list price, else what the tenant pays. Raises DatabaseUnavailable if no
        copy was ever read.
        """
        return (await self.tariffs(route, principal))(at)

    async def tariffs(self, route: str, principal: Principal) -> Callable[[datetime], Tariff]:
        """As ``tariff``, for any moment: of a request it is known only when it is admitted. Raises as ``tariff``."""
        versions = await self._copy.current()
        if versions is not self._scheduled or len(self._schedules) >= _MOST_SCHEDULES:
            self._scheduled, self._schedules = versions, {}
        of = (route, principal.tenant_id, principal.markup_bp)
        found = self._schedules.get(of)
        if found is None:
            own = versions.get((route, principal.tenant_id, "charge"), ())
            listed, cost = versions.get((route, None, "charge"), ()), versions.get((route, None, "cost"), ())
            found = self._schedules[of] = Schedule(own, listed, cost, principal.markup_bp).at
        return found

    async def price(self, route: str, at: datetime, *, basis: Basis = "charge") -> Price | None:
        """The list (or cost) price in force at ``at``; None: there is none then. Raises as ``tariff``."""
        return in_force((await self._copy.current()).get((route, None, basis), ()), at)

    async def prices(self, route: str, *, tenant: str | None = None, basis: Basis | None = None) -> list[Price]:
        """Every version a route had, has or will have, as Postgres has them now: list prices first, then tenants' own,
        each oldest first.

        ``tenant``: name or id; then only its own. Raises ConfigurationError, DatabaseUnavailable.
        """
        if not is_name(route):
            raise UnknownRoute(route)
        async with transaction(self._engine) as connection:
            query = select(prices).where(prices.c.route == route)
            if tenant is not None:
                query = query.where(prices.c.tenant_id == await _tenant_id(connection, tenant))
            if basis is not None:
                query = query.where(prices.c.basis == basis)
            order = (prices.c.tenant_id.nulls_first(), prices.c.basis, prices.c.effective_from)
            found = [_price(row) for row in await connection.execute(query.order_by(*order))]
            if not found:
                await _check_route(connection, route)
            return found

    async def stored_price(self, price_id: UUID) -> Price:
        """As Postgres has it now. Raises UnknownPrice, DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            row = (await connection.execute(select(prices).where(prices.c.id == price_id))).one_or_none()
        if row is None:
            raise UnknownPrice(price_id)
        return _price(row)

    async def set_price(self, actor: Actor, spec: PriceSpec) -> Price:
        """Set a price. It never changes once it is set, and rows already written keep the one they were charged by.

        Raises ConfigurationError, DatabaseUnavailable.
        """
        actor.check_may_change()
        spec = checked(spec)
        begin = spec.effective_from or self._clock.now()
        async with transaction(self._engine) as connection:
            await _check_route(connection, spec.route)
            tenant_id = None if spec.tenant is None else await _tenant_id(connection, spec.tenant)
            price = Price(
                id=uuid7(),
                route=spec.route,
                tenant_id=tenant_id,
                basis=spec.basis,
                compute_ceiling_s=spec.compute_ceiling_s,
                source=spec.source,
                effective_from=begin,
                **{name: getattr(spec, name) for name in RATES},
            )
            values = {name: getattr(price, name) for name in _FIELDS}
            try:
                await connection.execute(insert(prices).values(**values))
            except IntegrityError as fault:
                raise AlreadyExists(
                    f"route {spec.route!r} has such a price from {begin.isoformat()} on already; choose another begin"
                ) from fault
            given = {name: value for name, value in values.items() if value is not None}
            await audit(connection, actor, "create", "price", str(price.id), tenant_id=tenant_id, after=given)
        self._copy.expire()
        return price

    async def end_price(
        self, actor: Actor, price_id: UUID, at: datetime | None = None, *, if_version: int | None = None
    ) -> Price:
        """Let a price end at ``at`` (now, if not given): the list price takes the place of a tenant's own, and without
        one the route is unpriced. One that has not begun yet never will, and the version before it goes on.

        ``if_version``: only if that is its ``price_version``. Raises UnknownPrice, VersionConflict, ConfigurationError,
        DatabaseUnavailable.
        """
        actor.check_may_change()
        now = self._clock.now()
        if at is not None and (at.tzinfo is None or not now <= at <= LATEST):
            raise ConfigurationError(
                f"a price ends now or later, by {LATEST:%Y} at the latest, at a time with its zone, as "
                "2027-01-01T00:00:00Z"
            )
        async with transaction(self._engine) as connection:
            query = select(prices).where(prices.c.id == price_id).with_for_update()
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise UnknownPrice(price_id)
            price = _price(row)
            check_version("price", str(price_id), if_version, price_version(price))
            if price.withdrawn:
                raise StateConflict("this price ended before it began; set another")
            if price.effective_until is not None and price.effective_until <= now:
                raise StateConflict(f"this price ended at {price.effective_until.isoformat()} already")
            ended = replace(price, effective_until=max(at or now, price.effective_from))
            changed = update(prices).where(prices.c.id == price_id).values(effective_until=ended.effective_until)
            await connection.execute(changed)
            before, after = ({"effective_until": one.effective_until} for one in (price, ended))
            target = str(price_id)
            await audit(
                connection, actor, "update", "price", target, tenant_id=price.tenant_id, before=before, after=after
            )
        self._copy.expire()
        return ended

    async def hosted_price(
        self,
        route: str,
        provider: str,
        model: str,
        *,
        tenant: str | None = None,
        basis: Basis = "charge",
        effective_from: datetime | None = None,
    ) -> HostedPrice:
        """The price of a hosted model as one of ``route``'s, to be set by ``set_price``, and what it leaves out.

        Raises ConfigurationError, DatabaseUnavailable.
        """
        async with transaction(self._engine) as connection:
            await _check_route(connection, route)
            longest = await connection.scalar(select(routes.c.context_length).where(routes.c.name == route))
        at = effective_from or self._clock.now()
        # In a thread: loading the package's data takes a good part of a second.
        return await asyncio.to_thread(
            hosted_price,
            route,
            provider,
            model,
            at,
            tenant=tenant,
            basis=basis,
            effective_from=effective_from,
            longest_prompt=longest,
        )

    async def _read(self) -> _Versions:
        async with transaction(self._engine) as connection:
            mark = await connection.scalar(_MARK)
            if self._last is not None and self._last[0] == mark:
                return self._last[1]
            versions: _Versions = {}
            # Not those that were withdrawn before they began: the version before them goes on.
            ever = or_(prices.c.effective_until.is_(None), prices.c.effective_until > prices.c.effective_from)
            for row in await connection.execute(select(prices).where(ever).order_by(prices.c.effective_from)):
                versions.setdefault((row.route, row.tenant_id, row.basis), []).append(_price(row))
        self._last = (mark, versions)
        return versions


def price_version(price: Price) -> int:
    """Another number for each end that a price is given: nothing else of it changes."""
    return 1 if price.effective_until is None else int(price.effective_until.timestamp() * 1_000_000)


def _price(row: Any) -> Price:
    return Price(**{name: getattr(row, name) for name in _FIELDS})


async def _check_route(connection: AsyncConnection, name: str) -> None:
    if not is_name(name) or await connection.scalar(select(routes.c.name).where(routes.c.name == name)) is None:
        raise UnknownRoute(name)


async def _tenant_id(connection: AsyncConnection, ref: str) -> UUID:
    """Of the tenant with this name or id. Raises UnknownTenant."""
    wanted = as_id(ref)
    if wanted is None and not is_name(ref):
        raise UnknownTenant(ref)
    same = tenants.c.id == wanted if wanted is not None else tenants.c.name == ref
    found = await connection.scalar(select(tenants.c.id).where(same, tenants.c.archived_at.is_(None)))
    if not isinstance(found, UUID):
        raise UnknownTenant(ref)
    return found
