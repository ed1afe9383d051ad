"""The catalogue: pools and routes. Read on each request from a copy that is a few seconds old at most."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import Select, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.clock import Clock
from gateway.db.cached import CachedCopy
from gateway.db.engine import transaction
from gateway.db.tables import backends, pools, route_targets, routes
from gateway.policies.answer_cache import NO_POLICY, CachePolicy, merge
from gateway.policies.stored import read_policy
from gateway.routing.route import Route, Target, UnpricedPolicy
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import columns
from gateway.tenants.principal import LONGEST_REQUEST_S
from gateway.tenants.records import (
    AlreadyExists,
    ConfigurationError,
    StateConflict,
    Unknown,
    VersionConflict,
    check_name,
    is_name,
)
from gateway.tenants.specs import check_narrower, check_page

MAX_WEIGHT = 1e6
MAX_PRIORITY = 100
MAX_TARGETS = 20
_MAX_TOKENS = 100_000_000
_TOKENIZER = re.compile(r"[a-z0-9_]{1,50}", re.ASCII)


class UnknownRoute(Unknown):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no route {name[:100]!r}; `penstock route list` shows them")


class UnknownPool(Unknown):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no pool {name[:100]!r}; declare it first: penstock pool set {name[:100]}")


class RouteExists(AlreadyExists):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is a route {name!r} already; change it, or choose another name")


class RouteChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields as in ``Route``; what is left UNSET stays."""

    pool: str | UnsetType = UNSET
    backend_model: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    default_output_tokens: int | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    timeout_s: float | UnsetType = UNSET
    unpriced: UnpricedPolicy | UnsetType = UNSET
    tokenizer: str | UnsetType | None = UNSET
    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    more_targets: tuple[Target, ...] | UnsetType = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET


class Catalog:
    """Pools and routes. Changes reach other replicas within ``cache_s``; with Postgres away the last copy serves.

    Every change raises ConfigurationError or one of its kinds, NotAllowed, DatabaseUnavailable.
    """

    def __init__(self, engine: AsyncEngine, clock: Clock, *, cache_s: float = 5.0) -> None:
        self._engine = engine
        self._copy = CachedCopy("routes", self._read, clock, cache_s=cache_s)
        self._pools = CachedCopy("pools", self.pools, clock, cache_s=cache_s)

    async def route(self, name: str) -> Route | None:
        """None: there is no such route. Raises DatabaseUnavailable if no copy was ever read."""
        return (await self._copy.current()).get(name)

    async def routes(self) -> list[Route]:
        """All, by name. Raises as ``route``."""
        return list((await self._copy.current()).values())

    async def stored_route(self, name: str) -> Route:
        """As Postgres has it now. Raises UnknownRoute, DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            return await _stored(connection, name)

    async def list_routes(self, *, after: str | None = None, limit: int = 100) -> list[Route]:
        """By name, those behind ``after``, as Postgres has them now. Raises ConfigurationError, DatabaseUnavailable."""
        query = select(routes).order_by(routes.c.name).limit(check_page(limit))
        if after is not None:
            query = query.where(routes.c.name > after)
        async with transaction(self._engine) as connection:
            return await _routes(connection, query)

    async def create_route(self, actor: Actor, route: Route) -> Route:
        """Declare a route. Prices of an earlier route of that name are its own. Raises RouteExists, UnknownPool."""
        actor.check_may_change()
        route = replace(check_route(route), version=1)
        async with transaction(self._engine) as connection:
            for target in route.targets:
                await check_pool(connection, target.pool)
            query = insert(routes).values(_columns(route)).on_conflict_do_nothing().returning(routes.c.name)
            if await connection.scalar(query) is None:
                raise RouteExists(route.name)
            await _write_targets(connection, route)
            await audit(connection, actor, "create", "route", route.name, after=_audited(route))
        self._copy.expire()
        return route

    async def update_route(
        self, actor: Actor, name: str, change: RouteChange, *, if_version: int | None = None
    ) -> Route:
        """Change a route, if it still has the version ``if_version``.

        Raises UnknownRoute, UnknownPool, VersionConflict.
        """
        actor.check_may_change()
        given = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not UNSET}
        async with transaction(self._engine) as connection:
            old = await _stored(connection, name, lock=True, if_version=if_version)
            new = check_route(replace(old, **given))
            if new == old:
                return old
            for pool in {target.pool for target in new.targets} - {target.pool for target in old.targets}:
                await check_pool(connection, pool)
            new = replace(new, version=old.version + 1)
            await connection.execute(update(routes).where(routes.c.name == name).values(_columns(new)))
            if new.more_targets != old.more_targets:
                await connection.execute(delete(route_targets).where(route_targets.c.route == name))
                await _write_targets(connection, new)
            was, now = _audited(old), _audited(new)
            changed = [field for field, value in now.items() if value != was[field]]
            before, after = ({field: route[field] for field in changed} for route in (was, now))
            await audit(connection, actor, "update", "route", name, before=before, after=after)
        self._copy.expire()
        return new

    async def delete_route(self, actor: Actor, name: str, *, if_version: int | None = None) -> None:
        """Its prices stay, because rows were charged by them. Raises UnknownRoute, VersionConflict."""
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            old = await _stored(connection, name, lock=True, if_version=if_version)
            await connection.execute(delete(routes).where(routes.c.name == name))
            await audit(connection, actor, "delete", "route", name, before=_audited(old))
        self._copy.expire()

    async def pools(self) -> list[str]:
        """Names of the declared pools, as Postgres has them now. Raises DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            return list(await connection.scalars(select(pools.c.name).order_by(pools.c.name)))

    async def knows_pool(self, name: str) -> bool:
        """Whether the pool is declared, as of ``cache_s`` ago at most. Raises DatabaseUnavailable as ``route``."""
        return name in await self._pools.current()

    async def create_pool(self, actor: Actor, name: str) -> bool:
        """Declare a pool of backends; one that is declared stays as it is. Returns whether it is new."""
        actor.check_may_change()
        query = insert(pools).values(name=check_name("pool", name)).on_conflict_do_nothing().returning(pools.c.name)
        async with transaction(self._engine) as connection:
            if await connection.scalar(query) is None:
                return False
            await audit(connection, actor, "create", "pool", name, after={"name": name})
        self._pools.expire()
        return True

    async def delete_pool(self, actor: Actor, name: str) -> None:
        """Raises UnknownPool, and StateConflict while routes or backends use it."""
        actor.check_may_change()
        if not is_name(name):
            raise UnknownPool(name)
        try:
            async with transaction(self._engine) as connection:
                # Locked, so that nothing begins to use it meanwhile.
                query = select(pools.c.name).where(pools.c.name == name).with_for_update()
                if await connection.scalar(query) is None:
                    raise UnknownPool(name)
                await _check_unused(connection, name)
                await connection.execute(delete(pools).where(pools.c.name == name))
                await audit(connection, actor, "delete", "pool", name, before={"name": name})
        except IntegrityError as fault:
            raise StateConflict(f"routes or backends use the pool {name!r} since a moment ago") from fault
        self._pools.expire()

    async def _read(self) -> dict[str, Route]:
        async with transaction(self._engine) as connection:
            return {route.name: route for route in await _routes(connection, select(routes).order_by(routes.c.name))}


_COLUMNS = tuple(field for field in Route.__dataclass_fields__ if field != "more_targets")


def _columns(route: Route) -> dict[str, Any]:
    """Of the table ``routes``."""
    return columns({field: getattr(route, field) for field in _COLUMNS})


def _audited(route: Route) -> dict[str, Any]:
    return columns(asdict(route))


async def _routes(connection: AsyncConnection, query: Select[Any]) -> list[Route]:
    """``query``: rows of ``routes``."""
    rows = list(await connection.execute(query))
    targets: dict[str, list[Target]] = {}
    order = select(route_targets).order_by(route_targets.c.route, route_targets.c.position)
    for row in await connection.execute(order.where(route_targets.c.route.in_([row.name for row in rows]))):
        target = Target(row.pool, row.backend_model, row.weight, row.priority)
        targets.setdefault(row.route, []).append(target)
    return [
        Route(
            **{field: getattr(row, field) for field in _COLUMNS if field != "answer_cache"},
            answer_cache=merge(NO_POLICY, read_policy(row.answer_cache, CachePolicy)),
            more_targets=tuple(targets.get(row.name, ())),
        )
        for row in rows
    ]


async def _write_targets(connection: AsyncConnection, route: Route) -> None:
    rows = [
        {"route": route.name, "position": position, **asdict(target)}
        for position, target in enumerate(route.more_targets, start=1)
    ]
    if rows:
        await connection.execute(insert(route_targets), rows)


async def _stored(
    connection: AsyncConnection, name: str, *, lock: bool = False, if_version: int | None = None
) -> Route:
    query = select(routes).where(routes.c.name == name)
    found = await _routes(connection, query.with_for_update() if lock else query) if is_name(name) else []
    if not found:
        raise UnknownRoute(name)
    if if_version is not None and if_version != found[0].version:
        raise VersionConflict("route", name, if_version, found[0].version)
    return found[0]


async def _check_unused(connection: AsyncConnection, pool: str) -> None:
    """Raises StateConflict that names who uses the pool."""
    of_targets = select(route_targets.c.route).where(route_targets.c.pool == pool)
    for kind, query in (
        ("routes", select(routes.c.name).where(routes.c.pool == pool).union(of_targets)),
        ("backends", select(backends.c.name).where(backends.c.pool == pool)),
    ):
        if users := sorted(await connection.scalars(query)):
            shown = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
            raise StateConflict(f"{kind} use the pool {pool!r} ({shown}); delete them or give them another pool")


async def check_pool(connection: AsyncConnection, name: str) -> None:
    """Raises UnknownPool unless it is declared, and stays so until the transaction ends."""
    if (
        await connection.scalar(select(pools.c.name).where(pools.c.name == name).with_for_update(key_share=True))
        is None
    ):
        raise UnknownPool(name)


def check_route(route: Route) -> Route:
    """``route``, if its values can be. Raises ConfigurationError."""
    check_name("route", route.name)
    for target in route.targets:
        check_name("model", target.backend_model)
        check_name("pool", target.pool)
        if not 0 <= target.weight <= MAX_WEIGHT:
            raise ConfigurationError(f"weight must be between 0 and {MAX_WEIGHT:g}, not {target.weight:g}")
        if not 0 <= target.priority <= MAX_PRIORITY:
            raise ConfigurationError(f"priority must be between 0 and {MAX_PRIORITY}, not {target.priority}")
    if len(route.more_targets) >= MAX_TARGETS:
        raise ConfigurationError(f"a route has at most {MAX_TARGETS} targets, not {len(route.targets)}")
    for name in ("context_length", "default_output_tokens", "max_output_tokens"):
        value = getattr(route, name)
        if not 1 <= value <= _MAX_TOKENS:
            raise ConfigurationError(f"{name} must be between 1 and {_MAX_TOKENS} tokens, not {value}")
    if route.default_output_tokens > route.max_output_tokens:
        raise ConfigurationError("default_output_tokens must not be above max_output_tokens")
    if not 0 < route.timeout_s <= LONGEST_REQUEST_S:
        raise ConfigurationError(f"timeout_s must be above 0 and at most {LONGEST_REQUEST_S:.0f} seconds")
    check_narrower(route.answer_cache)
    if route.unpriced not in ("refuse", "serve"):
        raise ConfigurationError("unpriced must be `refuse` or `serve`")
    if route.tokenizer is not None and not _TOKENIZER.fullmatch(route.tokenizer):
        raise ConfigurationError(
            "tokenizer is the name of an encoding, as o200k_base, or `backend` for the one that the workers tell; "
            "without one, prompts are bounded by their bytes"
        )
    return route
