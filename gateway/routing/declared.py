"""The backends that administrators declared, as this replica knows them: a copy of Postgres' rows, seconds old at most.

Postgres away, the last copy stays. Workers that register themselves are the Registry's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import structlog
from sqlalchemy import Row, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.apis import Family
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import backends
from gateway.routing.backend_secrets import unseal_api_key, unseal_headers
from gateway.routing.route import Endpoint
from gateway.secret_key import SealBroken, SecretKey

REFRESH_S = 2.0
_log = structlog.get_logger(__name__)


class Brand(Protocol):
    """What is to be known of a brand of servers to declare one of them."""

    @property
    def family(self) -> Family: ...

    @property
    def prefix(self) -> str:
        """Between a backend's base URL and an API's own path."""
        ...

    @property
    def context_length(self) -> int:
        """Of a backend whose operator does not say."""
        ...

    def key_headers(self, secret: str) -> dict[str, str]:
        """What bears a backend's API key."""
        ...


class Unusable(Exception):
    """A declared backend cannot be used by this process; the message says why and what to do."""


class Declared:
    """Lists the enabled backends of a pool. Use as an async context manager: it keeps its copy fresh meanwhile."""

    def __init__(
        self, engine: AsyncEngine, secret_key: SecretKey, brands: Mapping[str, Brand], *, refresh_s: float = REFRESH_S
    ) -> None:
        """``brands``: those that this release knows, by name."""
        self._engine = engine
        self._secret_key = secret_key
        self._brands = brands
        self._refresh_s = refresh_s
        self._rows: dict[str, Row[Any]] = {}
        self._usable: dict[str, Endpoint] = {}
        self._pools: dict[str, list[Endpoint]] = {}
        self._refreshing = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Declared:
        await self._tasks.__aenter__()
        # The first request should find them; a Postgres that is away is awaited in the background.
        with contextlib.suppress(DatabaseUnavailable, SQLAlchemyError):
            await self.refresh()
        self._tasks.create_task(self._keep_fresh(), name="declared-refresh")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        await self._tasks.__aexit__(None, None, None)

    def endpoints(self, pool: str) -> Sequence[Endpoint]:
        """The pool's enabled backends, by name, as of at most ``refresh_s`` ago (later while Postgres is away)."""
        return self._pools.get(pool, ())

    def all(self) -> Sequence[Endpoint]:
        return list(self._usable.values())

    async def refresh(self) -> None:
        """Copy what Postgres knows. Raises DatabaseUnavailable."""
        # One at a time: of two readings the later one stays.
        async with self._refreshing:
            query = select(backends).where(backends.c.enabled).order_by(backends.c.name)
            async with transaction(self._engine) as connection:
                rows = {row.name: row for row in await connection.execute(query)}
            self._adopt(rows)

    async def changed(self) -> None:
        """A backend was changed by this replica: use it from now on, if Postgres answers; else in due time."""
        with contextlib.suppress(DatabaseUnavailable):
            await self.refresh()

    def _adopt(self, rows: dict[str, Row[Any]]) -> None:
        usable: dict[str, Endpoint] = {}
        pools: dict[str, list[Endpoint]] = {}
        for name, row in rows.items():
            endpoint = self._usable.get(name) if row == self._rows.get(name) else self._read(row)
            if endpoint is not None:
                usable[name] = endpoint
                pools.setdefault(endpoint.pool, []).append(endpoint)
        if usable.keys() != self._usable.keys():
            _log.info("declared_backends", names=list(usable))
        self._rows, self._usable, self._pools = rows, usable, pools

    def _read(self, row: Row[Any]) -> Endpoint | None:
        try:
            return endpoint_of(row, self._secret_key, self._brands)
        except Unusable as fault:
            _log.error("declared_backend_left_out", backend=row.name, reason=str(fault))
            return None

    async def _keep_fresh(self) -> None:
        failing = False
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._closing.wait()
                    return
            try:
                await self.refresh()
                failing = False
            # Besides an outage, a database that is yet to be migrated: /readyz tells of that.
            except (DatabaseUnavailable, SQLAlchemyError) as fault:
                if not failing:
                    _log.warning("declared_backends_not_refreshed", reason=type(fault).__name__)
                failing = True


def endpoint_of(row: Row[Any], secret_key: SecretKey, brands: Mapping[str, Brand]) -> Endpoint:
    """``row``: of the table ``backends``. Raises Unusable."""
    brand = brands.get(row.brand)
    if brand is None:
        raise Unusable(f"this release knows no brand {row.brand!r}")
    try:
        headers = {} if row.headers is None else unseal_headers(secret_key, row.name, row.base_url, row.headers)
        if row.api_key is not None:
            headers |= brand.key_headers(unseal_api_key(secret_key, row.name, row.base_url, row.api_key))
    except SealBroken as fault:
        raise Unusable(
            "its secrets were sealed by another PENSTOCK_SECRET_KEY, or were changed in the database; set its API key "
            "and headers anew"
        ) from fault
    return Endpoint(
        id=row.name,
        pool=row.pool,
        base_url=row.base_url,
        model=row.name,
        context_length=row.context_length,
        family=brand.family,
        brand=row.brand,
        sends_model=row.model,
        headers=headers,
        weight=row.weight,
        priority=row.priority,
        connect_timeout_s=row.connect_timeout_s,
        first_byte_timeout_s=row.first_byte_timeout_s,
        idle_timeout_s=row.idle_timeout_s,
        revision=row.version,
    )
