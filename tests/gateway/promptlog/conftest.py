"""A prompt log of one tenant, on real services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.redis_url import ClusterAddress, parse_redis_url
from tests.gateway.datakeys.support import tenant
from tests.gateway.db.support import opened
from tests.gateway.promptlog.support import Rig
from tests.gateway.promptlog.support import rig as make_rig


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=3) as engine:
        yield engine


@pytest.fixture
def log_url(redis_url: str) -> str:
    if isinstance(parse_redis_url(redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    return redis_url


@pytest.fixture
async def rig(log_url: str, engine: AsyncEngine) -> AsyncIterator[Rig]:
    async with make_rig(log_url, engine) as rig:
        yield rig


@pytest.fixture
async def acme(engine: AsyncEngine) -> UUID:
    return await tenant(engine, "acme")


@pytest.fixture
async def globex(engine: AsyncEngine) -> UUID:
    return await tenant(engine, "globex")
