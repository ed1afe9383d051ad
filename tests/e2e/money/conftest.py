from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.money.fleet import Fleet


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Three gateways that all tests of this folder share: a test that kills one puts another in its place."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        await fleet.start(3)
        yield fleet
    finally:
        await fleet.stop()
