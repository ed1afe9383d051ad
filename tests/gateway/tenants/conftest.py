from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory
from gateway.tenants.service import Tenants
from tests.gateway.db.support import ManualClock, opened
from tests.gateway.tenants.support import Announcements


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url) as engine:
        yield engine


@pytest.fixture
def announced() -> Announcements:
    return Announcements()


@pytest.fixture
def secret_key() -> SecretKey:
    return SecretKey("secret-key-of-the-tests-of-the-directory")


@pytest.fixture
def service(engine: AsyncEngine, clock: ManualClock) -> Tenants:
    return Tenants(engine, clock)


@pytest.fixture
def directory(
    engine: AsyncEngine, clock: ManualClock, service: Tenants, announced: Announcements, secret_key: SecretKey
) -> Directory:
    """The directory of the replica whose keys ``service`` verifies."""
    return Directory(engine, clock, secret_key=secret_key, announce=announced, forget=service.forget)
