from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from tests.gateway.backends.http_support import RawServer
from tests.gateway.backends.relay_support import Rig, rigged

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """What deals with sockets itself is tried on both event loops: production has uvloop."""
    if item.path.stem.startswith("test_http_"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made


@pytest.fixture
async def raw_server() -> AsyncIterator[Callable[..., RawServer]]:
    """``async with`` it, or ``await server.start()``; what its script raised fails the test at its end."""
    made: list[RawServer] = []

    def make(*arguments: object, **more: object) -> RawServer:
        made.append(RawServer(*arguments, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        await server.stop()
    for server in made:
        if server.failures:
            raise server.failures[0]
