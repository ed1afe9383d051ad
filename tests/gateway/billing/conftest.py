from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.gateway.db.support import ManualClock, opened


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url) as engine:
        yield engine
