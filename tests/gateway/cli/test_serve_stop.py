"""SIGTERM to a running ``penstock serve``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.prices import PriceBook
from gateway.clock import SystemClock
from gateway.db.engine import create_engine
from gateway.db.tables import usage_events
from gateway.routing.registry import Registry
from gateway.routing.route import Route
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory
from tests.gateway.conftest import price_spec
from tests.gateway.tenants.support import ACTOR
from tests.ports import free_port
from worker.protocol.fleet import WorkerRecord

PATH = "/v1/chat/completions"
DRAIN_S = 1


@contextlib.asynccontextmanager
async def serving(environment: dict[str, str], port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "penstock", "serve", "--port", str(port), env=os.environ | environment
    )
    try:
        async with asyncio.timeout(30), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Connection:
    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    def ask(self, content: str, *, stream: bool) -> None:
        body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": content}]})
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    def get(self, path: str) -> None:
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def answered(self, until: str) -> str:
        return (await self._reader.readuntil(until.encode())).decode()

    async def rest(self) -> str:
        """All that comes until the gateway closes the connection."""
        told = (await self._reader.read()).decode()
        self._writer.close()
        return told


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=2)
    yield engine
    await engine.dispose()


async def test_a_stop_takes_nothing_new_lets_streams_end_cuts_the_rest_and_settles_all(
    engine: AsyncEngine, database_url: str, redis_url: str, upstream: Any, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def converse(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        if c.body["messages"][0]["content"] == "ends":
            await go_on.wait()
            await c.token("is", 2)
            await c.done()
        else:
            await c.wait_closed_by_peer(within_s=30)

    server = await upstream(converse)
    clock = SystemClock()
    directory, catalog = Directory(engine, clock), Catalog(engine, clock)
    await catalog.create_pool(ACTOR, "pool")
    await catalog.create_route(ACTOR, Route("m", "pool", "m", 1000, 50, 500, 60.0))
    await PriceBook(engine, clock).set_price(ACTOR, price_spec("m", "1", "2"))
    await directory.create_tenant(ACTOR, "acme")
    key, _ = await directory.create_key(ACTOR, "acme", "test")
    port = free_port()
    environment = {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "PENSTOCK_SECRET_KEY": "secret-key-of-the-tests-of-this-gateway",
        "PENSTOCK_FLEET_TOKEN": "fleet-token-of-the-tests",
        "PENSTOCK_SPOOL_DIR": str(tmp_path / "spool"),
        "PENSTOCK_READY_NEEDS_BACKEND": "true",
        "PENSTOCK_PROBE_INTERVAL_S": "3600",
        "PENSTOCK_DRAIN_S": str(DRAIN_S),
    }
    async with Registry(redis_url, ttl_s=600.0, timeout_s=2.0, refresh_s=600.0) as registry:
        record = WorkerRecord(worker_id="w1", pool="pool", base_url=server.url, model="m", context_length=1000)
        await registry.register(record)
        async with asyncio.timeout(45), serving(environment, port) as process:
            ends, waits, cut, whole, idle, half = [await Connection(port, key).open() for _ in range(6)]
            ends.ask("ends", stream=True)
            waits.ask("ends", stream=True)
            waits.get("/readyz")
            waits.ask("ends", stream=True)
            cut.ask("goes on", stream=True)
            whole.ask("goes on", stream=False)
            half._writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            idle.get("/healthz")
            await idle.answered('{"status":"ok"}')
            for streaming in (ends, waits, cut):
                await streaming.answered("Par")
            while len(server.seen) < 4:  # noqa: ASYNC110 - tells no event
                await asyncio.sleep(0.02)

            process.send_signal(signal.SIGTERM)
            assert await idle.rest() == ""
            assert await half.rest() == ""
            with pytest.raises(OSError):  # noqa: PT011 - whichever: nobody listens
                await Connection(port, key).open()
            go_on.set()
            assert "is" in (told := await ends.rest())
            assert told.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
            stream, ready = (await waits.rest()).split("[DONE]")
            assert "is" in stream
            assert "HTTP/1.1 503 " in ready
            assert '"status":"draining"' in ready
            told = await cut.rest()
            assert '"code":"gateway_stopping"' in told
            assert "[DONE]" not in told
            told = await whole.rest()
            assert told.startswith("HTTP/1.1 503 ")
            assert '"code":"gateway_stopping"' in told
            assert await process.wait() == 0
    # All of it reached Postgres before the process ended.
    async with engine.connect() as connection:
        rows = list(await connection.execute(select(usage_events)))
    assert sorted((row.status, row.error_code, row.completion_tokens) for row in rows) == [
        ("failed", "gateway_stopping", 1),
        ("failed", "gateway_stopping", 1),
        ("ok", None, 2),
        ("ok", None, 2),
    ]
