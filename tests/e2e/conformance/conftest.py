from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.redis_url import client
from gateway.settings import Settings
from tests.e2e.conformance.targets import Clients, House, Target, clients_of, house
from tests.e2e.stack import MODEL, Stack


@pytest.fixture(scope="module")
def gateway_settings(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Of one gateway for a whole module, with a database of its own."""
    database_url = databases.take()
    with client(redis_server) as connected:
        connected.flushdb()
    yield Settings(
        database_url=database_url,
        redis_url=redis_server,
        secret_key="secret-key-of-the-tests-of-this-gateway",
        drain_interval_s=0.05,
        probe_interval_s=3600.0,
        # Clients, gateway and backends share one event loop, which a busy machine may hold up.
        connect_timeout_s=20.0,
        redis_timeout_s=10.0,
        lease_s=60.0,
        spool_dir=str(tmp_path_factory.mktemp("spool")),
    )
    databases.drop(database_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standins(gateway_settings: Settings) -> AsyncIterator[House]:
    async with house(gateway_settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker_clients(shared_stack: Stack) -> AsyncIterator[Clients]:
    async with clients_of(shared_stack.url, shared_stack.key) as clients:
        yield clients


@pytest.fixture
def worker(worker_clients: Clients) -> Target:
    """Nothing here hurts the stack, so that it need not be seen to in between."""
    return Target(MODEL, worker_clients)
