"""When a WebSocket is closed that its client would keep open."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.gateway.http.websocket_client import Paused, answer, ask, closing, code_of, opened


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not(
    start_gateway: Any, upstream: Any
) -> None:
    async def slow(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await asyncio.sleep(0.6)
        await c.done()

    async with start_gateway(websocket_idle_s=0.3) as gateway:
        await gateway.register(await upstream(slow))
        async with opened(gateway) as connection:
            await ask(connection)
            assert (await answer(connection))[-1] == "[DONE]"
            assert await closing(connection) == (1000, "nothing was asked for 0.3 s")
        await gateway.rows(1)


async def test_a_stop_closes_idle_connections_and_lets_a_stream_end(start_gateway: Any, upstream: Any) -> None:
    paused = Paused()
    async with start_gateway() as gateway:
        gateway.server.config.timeout_graceful_shutdown = 10
        await gateway.register(await upstream(paused))
        async with opened(gateway) as idle, opened(gateway) as busy:
            await ask(busy)
            await busy.recv()
            gateway.server.should_exit = True
            assert await closing(idle) == (1012, "the gateway restarts")
            await ask(busy, {"type": "ping"})
            assert json.loads(await busy.recv()) == {"type": "pong"}
            paused.go.set()
            assert (await answer(busy))[-1] == "[DONE]"
            assert await closing(busy) == (1012, "the gateway restarts")
        await gateway.server.stopped.wait()
        (row,) = await gateway.rows()
        assert row.status == "ok"


async def test_a_stream_that_outlasts_the_stop_is_cut_with_an_error(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway() as gateway:
        await gateway.register(await upstream(Paused()))
        async with opened(gateway) as connection:
            await ask(connection)
            await connection.recv()
            gateway.server.should_exit = True
            assert code_of((await answer(connection))[-1]) == "gateway_stopping"
            assert (await closing(connection))[0] == 1012
        await gateway.server.stopped.wait()
        (row,) = await gateway.rows()
        assert (row.status, row.error_code) == ("failed", "gateway_stopping")
