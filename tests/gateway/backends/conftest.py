from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.backends.relay_support import Rig, rigged


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made
