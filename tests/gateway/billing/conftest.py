from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.redis_url import client as redis_client
from tests.gateway.billing.support import Stream
from tests.gateway.db.support import ManualClock, opened


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url) as engine:
        yield engine


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis_client(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def stream(client: redis.Redis) -> Stream:
    return Stream(client)
