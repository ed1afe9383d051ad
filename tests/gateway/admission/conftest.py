from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.admission.service import Admission
from tests.gateway.admission.support import Ledger, admission


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, redis_url: str) -> str:
    """An empty Redis; for tests marked ``on_both``, a cluster's turn comes too."""
    if getattr(request, "param", "server") == "cluster":
        return str(request.getfixturevalue("redis_cluster_url"))
    return redis_url


@pytest.fixture
def ledger(redis_url: str) -> Ledger:
    return Ledger(redis_url)


@pytest.fixture
async def gate(redis_url: str, ledger: Ledger) -> AsyncIterator[Admission]:
    """An admission whose heartbeat and janitor run only when a test calls them."""
    async with admission(redis_url, ledger) as opened:
        yield opened
