from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.admission.service import Admission
from tests.gateway.admission.support import Ledger, admission


@pytest.fixture
def ledger(redis_url: str) -> Ledger:
    return Ledger(redis_url)


@pytest.fixture
async def gate(redis_url: str, ledger: Ledger) -> AsyncIterator[Admission]:
    """An admission whose heartbeat and janitor run only when a test calls them."""
    async with admission(redis_url, ledger) as opened:
        yield opened
