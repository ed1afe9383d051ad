"""A gateway for all tests of a module, before one backend that each of them tells what to say.

Such a module has no test with a gateway of its own, which would empty Redis; and each waits for the rows that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway.ids import uuid7
from gateway.redis_url import client
from gateway.settings import Settings
from gateway.tenants.directory import LimitSpec
from tests.gateway.conftest import Gateway, Script, Upstream, running_gateway


class SharedGateway:
    """As one test sees it: like ``Gateway``, with the rows of its own requests alone."""

    def __init__(self, gateway: Gateway, server: Upstream) -> None:
        self._gateway = gateway
        self._server = server
        self._since = uuid7()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    async def register(self, server: Upstream) -> None:
        assert server is self._server  # which is registered

    async def rows(self, count: int = 1) -> list[Any]:
        """As ``Gateway.rows``. An earlier test's row may still be on its way: ids tell whose it is."""
        async with asyncio.timeout(5):
            while len(await self._rows()) < count:  # noqa: ASYNC110 - the drainer tells no event
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.15)
        found = await self._rows()
        assert len(found) == count
        return found

    async def _rows(self) -> list[Any]:
        return [row for row in await self._gateway._rows() if row.request_id > self._since]


class Shared:
    def __init__(self, gateway: Gateway, server: Upstream) -> None:
        self._gateway = gateway
        self._server = server

    async def view(self) -> SharedGateway:
        return SharedGateway(self._gateway, self._server)

    async def script(self, *scripts: Script) -> Upstream:
        """In the place of the fixture ``upstream``."""
        self._server.scripts = list(scripts)
        self._server.seen.clear()
        return self._server

    def check(self) -> None:
        """What a script raised fails the test."""
        failures, self._server.failures = self._server.failures, []
        if failures:
            raise failures[0]


@contextlib.asynccontextmanager
async def shared_gateway(
    databases: Any, redis_server: str, folder: Path, *, limits: Sequence[LimitSpec] = (), **changes: Any
) -> AsyncIterator[Shared]:
    with client(redis_server) as connected:
        connected.flushdb()
    url = databases.take()
    values: dict[str, Any] = {
        "database_url": url,
        "redis_url": redis_server,
        "fleet_token": "fleet-token-of-the-tests",
        "secret_key": "secret-key-of-the-tests-of-this-gateway",
        "drain_interval_s": 0.05,
        "probe_interval_s": 3600.0,
        "connect_timeout_s": 20.0,
        "redis_timeout_s": 10.0,
        "spool_dir": str(folder / "spool"),
    }
    server = Upstream([])
    await server.start()
    async with running_gateway(Settings(**(values | changes)), limits=limits) as gateway:
        await gateway.register(server)
        yield Shared(gateway, server)
    await server.stop()
    databases.drop(url)
