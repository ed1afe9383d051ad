"""A backend on a raw socket that does what a test's script says, byte by byte; and a gateway before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app import create_app
from gateway.billing.price_spec import PriceSpec
from gateway.billing.prices import Price, PriceBook
from gateway.clock import Clock, SystemClock
from gateway.db.engine import create_engine
from gateway.db.tables import usage_events
from gateway.http.server import server_config
from gateway.routing.registry import Registry
from gateway.routing.route import Route
from gateway.settings import Settings
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory, LimitSpec
from tests.gateway.tenants.support import ACTOR as TESTER
from worker.protocol.fleet import WorkerRecord
from worker.protocol.sse import DONE, encode_event
from worker.protocol.usage import MeterReading, encode_meter

EVENT_STREAM = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


def price_spec(route: str, input_: str, output: str, **more: Any) -> PriceSpec:
    return PriceSpec(route=route, input_usd_per_mtok=Decimal(input_), output_usd_per_mtok=Decimal(output), **more)


def chunk_event(text: str | None, *, finish: str | None = None, model: str = "m", **extra: Any) -> bytes:
    """Data of one streamed event."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]} | extra,
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()


def whole_event(text: str = "Paris", *, model: str = "m", prompt: int = 9, completion: int = 3) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
    ).encode()


@dataclass
class Conversation:
    """One request that the backend got, and the means to answer it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: str
    headers: dict[str, str]
    raw: bytes
    ending: str
    """Header that says what becomes of the connection after the answer."""

    @property
    def body(self) -> dict[str, Any]:
        decoded = json.loads(self.raw)
        assert isinstance(decoded, dict)
        return decoded

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self) -> None:
        await self.send(f"{EVENT_STREAM}{self.ending}\r\n".encode())

    async def send_piece(self, data: bytes) -> None:
        """One chunk of the body."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def meter(self, prompt: int, completion: int) -> None:
        await self.send_piece(encode_meter(MeterReading(prompt, completion)))

    async def event(self, data: bytes) -> None:
        await self.send_piece(encode_event(data))

    async def token(self, text: str, completion: int, *, prompt: int = 9, model: str = "m") -> None:
        """An event with running usage before it, as our worker sends it."""
        reading = encode_meter(MeterReading(prompt, completion))
        await self.send_piece(reading + encode_event(chunk_event(text, model=model)))

    async def done(self) -> None:
        await self.send_piece(encode_event(DONE))
        await self.send(b"0\r\n\r\n")

    async def whole(self, data: bytes | None = None, *, prompt: int = 9, completion: int = 3) -> None:
        await self.begin()
        await self.meter(prompt, completion)
        await self.event(data or whole_event(prompt=prompt, completion=completion))
        await self.done()

    async def status(self, status: int, body: bytes, *, media_type: str = "application/json", more: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n"
        await self.send(f"{head}{self.ending}{more}\r\n".encode() + body)

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def wait_closed_by_peer(self, within_s: float = 5.0) -> float:
        """Seconds until the gateway closed the connection."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(within_s):
            try:
                while await self.reader.read(4096):
                    pass
            except ConnectionError:
                pass
        return loop.time() - began


Script = Callable[[Conversation], Awaitable[None]]


@dataclass
class Upstream:
    """Answers the n-th request by the n-th script, and later ones by the last. A script's end closes the connection
    unless it sets ``keep_alive``."""

    scripts: list[Script]
    keep_alive: bool = False
    seen: list[Conversation] = field(default_factory=list)
    connections: int = 0
    url: str = ""
    port: int = 0
    failures: list[BaseException] = field(default_factory=list)
    server: asyncio.Server | None = None
    talking: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            for task in self.talking:
                task.cancel()
            await asyncio.gather(*self.talking, return_exceptions=True)
            await self.server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.talking.add(task)
        ending = "" if self.keep_alive else "connection: close\r\n"
        try:
            while True:
                try:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                if first.startswith("GET /health "):  # a probe, which may come at any time and is no part of a script
                    writer.write(f"HTTP/1.1 200 X\r\ncontent-length: 0\r\n{ending}\r\n".encode())
                    if not self.keep_alive:
                        return
                    continue
                conversation = Conversation(reader, writer, first, headers, raw, ending)
                self.seen.append(conversation)
                script = self.scripts[min(len(self.seen), len(self.scripts)) - 1]
                try:
                    await script(conversation)
                except ConnectionError:
                    return
                except Exception as fault:
                    self.failures.append(fault)
                    return
                if not self.keep_alive:
                    return
        finally:
            self.talking.discard(task)
            writer.close()


UpstreamFactory = Callable[..., Awaitable[Upstream]]


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamFactory]:
    """``await upstream(script, ...)`` starts a backend; what a script raised fails the test at its end."""
    started: list[Upstream] = []

    async def start(*scripts: Script, keep_alive: bool = False) -> Upstream:
        server = Upstream(list(scripts), keep_alive)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()
    for server in started:
        if server.failures:
            raise server.failures[0]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self.stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the test run's own handlers stay


@dataclass
class Gateway:
    """A gateway on a real socket, its Postgres and Redis, and what a test wants to know of them."""

    url: str
    port: int
    key: str
    admin_key: str
    settings: Settings
    directory: Directory
    catalog: Catalog
    prices: PriceBook
    engine: AsyncEngine
    registry: Registry
    registered: set[str] = field(default_factory=set, kw_only=True)
    server: _Server

    async def register(self, upstream: Upstream, worker_id: str = "w1", *, model: str = "m") -> None:
        await self.registry.register(
            WorkerRecord(worker_id=worker_id, pool="pool", base_url=upstream.url, model=model, context_length=1000)
        )
        self.registered.add(worker_id)
        await self._settle_view()

    async def withdraw(self, worker_id: str = "w1") -> None:
        await self.registry.withdraw(worker_id)
        self.registered.discard(worker_id)

    async def _settle_view(self) -> None:
        """Wait until the gateway's own copy of the registry has them."""
        async with asyncio.timeout(5), httpx.AsyncClient() as client:
            while True:
                state = (await client.get(self.url + "/readyz")).json()
                if state["backends"] >= len(self.registered):
                    return
                await asyncio.sleep(0.02)

    async def create_route(self, route: Route) -> None:
        await self.catalog.create_route(TESTER, route)

    async def set_price(self, route: str, input_: str, output: str, *, effective_from: datetime | None = None) -> Price:
        """USD per million tokens."""
        return await self.prices.set_price(TESTER, price_spec(route, input_, output, effective_from=effective_from))

    async def rows(self, count: int = 1, *, within_s: float = 5.0) -> list[Any]:
        """The ledger, oldest first, once it has ``count`` rows; a little longer, in case there come more."""
        async with asyncio.timeout(within_s):
            while len(rows := await self._rows()) < count:  # noqa: ASYNC110 - another process would tell no event
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.15)
        rows = await self._rows()
        assert len(rows) == count
        return rows

    async def _rows(self) -> list[Any]:
        async with self.engine.connect() as connection:
            return list(await connection.execute(select(usage_events).order_by(usage_events.c.request_id)))


@contextlib.asynccontextmanager
async def running_gateway(
    settings: Settings, *, limits: Sequence[LimitSpec] = (), gateway_clock: Clock | None = None
) -> AsyncIterator[Gateway]:
    """Seeds a fresh database and serves ``create_app`` on a free port."""
    clock = SystemClock()
    engine = create_engine(settings.database_url, pool_size=2)
    directory, catalog = Directory(engine, clock), Catalog(engine, clock)
    prices = PriceBook(engine, clock)
    await catalog.create_pool(TESTER, "pool")
    await catalog.create_route(
        TESTER,
        Route(
            "m",
            "pool",
            "m",
            context_length=1000,
            default_output_tokens=50,
            max_output_tokens=500,
            timeout_s=30.0,
        ),
    )
    await prices.set_price(TESTER, price_spec("m", "1", "2", effective_from=datetime(2026, 1, 1, tzinfo=UTC)))
    await directory.create_tenant(TESTER, "acme", limits=limits)
    key, _ = await directory.create_key(TESTER, "acme", "test")
    admin_key, _ = await directory.create_admin_key(TESTER)
    async with Registry(settings.redis_url, ttl_s=600.0, timeout_s=2.0, refresh_s=600.0) as registry:
        app = create_app(settings, clock=gateway_clock)
        config = server_config(app, settings, port=0, timeout_graceful_shutdown=1)
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            gateway = Gateway(
                f"http://127.0.0.1:{port}",
                port,
                key,
                admin_key,
                settings,
                directory,
                catalog,
                prices,
                engine,
                registry,
                server,
            )
            fault: BaseException | None = None
            try:
                yield gateway
            except BaseException as caught:  # a failed test, too, wants its gateway stopped in good order
                fault = caught
            server.should_exit = True
    await engine.dispose()
    if fault is not None:
        raise fault


GatewayFactory = Callable[..., contextlib.AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def start_gateway(database_url: str, redis_url: str, tmp_path: Path) -> GatewayFactory:
    """``async with start_gateway(limits=..., keepalive_s=...) as gateway``"""

    def start(
        *, limits: Sequence[LimitSpec] = (), gateway_clock: Clock | None = None, **changes: Any
    ) -> contextlib.AbstractAsyncContextManager[Gateway]:
        values: dict[str, Any] = {
            "database_url": database_url,
            "redis_url": redis_url,
            "fleet_token": "fleet-token-of-the-tests",
            "secret_key": "secret-key-of-the-tests-of-this-gateway",
            "drain_interval_s": 0.05,
            # Most scripts know nothing of probes.
            "probe_interval_s": 3600.0,
            "spool_dir": str(tmp_path / "spool"),
        }
        return running_gateway(Settings(**(values | changes)), limits=limits, gateway_clock=gateway_clock)

    return start


@pytest.fixture
async def gateway(start_gateway: GatewayFactory) -> AsyncIterator[Gateway]:
    """With limits that no busy machine reaches; tests of the limits themselves start a gateway with their own."""
    async with start_gateway(connect_timeout_s=20.0, redis_timeout_s=10.0) as running:
        yield running
