"""Several `penstock serve` on a Postgres and a Redis of their own, before a backend that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import httpx
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from websockets.asyncio.client import connect

from gateway.admission.redis import create_redis
from gateway.admission.snapshot import BudgetCounter, TenantCounters, snapshot
from gateway.billing.price_spec import PriceSpec
from gateway.billing.prices import PriceBook
from gateway.clock import SystemClock
from gateway.db.engine import create_engine, transaction
from gateway.db.migrate import upgrade
from gateway.local.services import EmbeddedPostgres, EmbeddedRedis, log_tail
from gateway.redis_url import asyncio_client
from gateway.routing.registry import Registry
from gateway.routing.route import Route
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory, LimitSpec
from gateway.verify.service import Verification, verify
from tests.gateway.conftest import Conversation, Upstream
from tests.ports import free_port
from worker.protocol.fleet import WorkerRecord

BIN = Path(sys.executable).parent
ACTOR = Actor("tester")
SECRET = "secret-key-of-the-tests-of-several-gateways"
LEASE_S = 3.0
PROMPT, COMPLETION = 9, 4
"""Tokens of an answer as the backend tells them."""
CHARGE = PROMPT * 1000 + COMPLETION * 2000
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Tell."}], "max_tokens": 20}
CHAT, WEBSOCKET = "/v1/chat/completions", "/v1/realtime-chat"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    WEBSOCKET: BODY,
    "/v1/completions": {"model": "m", "prompt": ["Tell.", "And tell."], "max_tokens": 20},
    "/v1/embeddings": {"model": "m", "input": ["Tell.", "And tell."]},
}
VECTORS = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"model":"m"}'


async def until(probe: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s) as limit:
        try:
            while not probe():  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.02)
        finally:
            if limit.expired():
                print(f"not within {limit_s} s: {what}")


@dataclass
class Backend:
    """Answers at once, or holds requests back until told to go on: ``held`` before the first byte, ``paused`` in
    mid-answer, after three of four tokens."""

    held: bool = False
    paused: bool = False
    asked: int = 0
    streaming: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self, *, midway: bool = False) -> None:
        self.held, self.paused, self.asked, self.streaming = not midway, midway, 0, 0
        self.go = asyncio.Event()

    def release(self) -> None:
        self.held = self.paused = False
        self.go.set()

    async def answer(self, call: Conversation) -> None:
        path = call.head.split()[1]
        if path not in BODIES:
            await call.status(404, b"{}")
            return
        self.asked += 1
        go = self.go
        if self.held:
            await go.wait()
        if path == "/v1/embeddings":
            await call.whole(VECTORS, prompt=PROMPT, completion=0)
            return
        if not call.body.get("stream"):
            await call.whole(prompt=PROMPT, completion=COMPLETION)
            return
        await call.begin()
        for token in range(1, COMPLETION + 1):
            if token == COMPLETION and self.paused:
                self.streaming += 1
                await go.wait()
            await call.token("x", token, prompt=PROMPT)
        await call.done()


Outcome = Literal["ok", "refused", "cut", "unknown"]


@dataclass
class Answer:
    """What a client knows of one request."""

    sent_id: str
    outcome: Outcome
    status: int = 0
    request_id: str | None = None
    code: str | None = None
    told: str | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)


class Replica:
    """One gateway process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"gateway-{self.port}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [BIN / "penstock", "serve", "--port", str(self.port)],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def ready(self) -> None:
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                assert self.process.poll() is None, log_tail(self.log, 40)
                with contextlib.suppress(httpx.TransportError):
                    state = (await client.get(self.url + "/readyz", timeout=2)).json()
                    if state.get("backends"):
                        return
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.postgres = EmbeddedPostgres(folder / "postgres")  # durable: some tests kill it
        self.redis = EmbeddedRedis(folder / "redis")
        self.backend = Backend()
        self.replicas: list[Replica] = []
        self.client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=400))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, replicas: int) -> None:
        database_url = await asyncio.to_thread(self.postgres.start)
        redis_url = await asyncio.to_thread(self.redis.start)
        await asyncio.to_thread(upgrade, database_url)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "PENSTOCK_SECRET_KEY": SECRET,
            "PENSTOCK_FLEET_TOKEN": "fleet-token-of-the-tests",
            "PENSTOCK_LEASE_S": str(LEASE_S),
            "PENSTOCK_LEASE_RENEWAL_S": "0.5",
            "PENSTOCK_DRAIN_INTERVAL_S": "0.1",
            "PENSTOCK_SPOOL_DIR": str(self.folder / "spool"),
        }
        self.engine: AsyncEngine = create_engine(database_url, pool_size=6)
        clock = SystemClock()
        self.directory = Directory(self.engine, clock, secret_key=SecretKey(SECRET))
        catalog = Catalog(self.engine, clock)
        await catalog.create_pool(ACTOR, "pool")
        await catalog.create_route(ACTOR, Route("m", "pool", "m", 1000, 50, 500, 60.0))
        since = datetime(2026, 1, 1, tzinfo=UTC)
        one, two = Decimal(1), Decimal(2)
        spec = PriceSpec(route="m", input_usd_per_mtok=one, output_usd_per_mtok=two, effective_from=since)
        await PriceBook(self.engine, clock).set_price(ACTOR, spec)
        self.upstream = Upstream([self.backend.answer])
        await self.upstream.start()
        self._tasks.append(asyncio.create_task(self._stay_registered(redis_url)))
        self.replicas = [self.launch() for _ in range(replicas)]
        await asyncio.gather(*(replica.ready() for replica in self.replicas))

    def launch(self) -> Replica:
        return Replica(self.folder, self.environment)

    async def stop(self) -> None:
        self.backend.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()
        await asyncio.gather(*(asyncio.to_thread(replica.stop) for replica in self.replicas))
        await self.upstream.stop()
        await self.engine.dispose()
        self.redis.stop()
        self.postgres.stop()

    async def _stay_registered(self, redis_url: str) -> None:
        """As a worker does, also after Redis lost all it knew."""
        record = WorkerRecord(worker_id="w1", pool="pool", base_url=self.upstream.url, model="m", context_length=1000)
        async with Registry(redis_url, ttl_s=60.0, timeout_s=1.0, refresh_s=60.0) as registry:
            while True:
                with contextlib.suppress(Exception):
                    await registry.register(record)
                await asyncio.sleep(0.3)

    # -- clients

    async def tenant(self, name: str, *limits: LimitSpec) -> str:
        """A new tenant's key."""
        await self.directory.create_tenant(ACTOR, name)
        key, record = await self.directory.create_key(ACTOR, name, "test")
        for limit in limits:
            mine = {"target": record.public_id} if limit.subject == "key" else {}
            await self.directory.set_limit(ACTOR, name, LimitSpec(**(_fields(limit) | mine)))
        return key

    async def ask(self, key: str, replica: int, *, path: str = CHAT, stream: bool = False, **body: Any) -> Answer:
        answer = Answer(str(uuid4()), "unknown")
        headers = {"authorization": f"Bearer {key}", "x-request-id": answer.sent_id}
        url = self.replicas[replica % len(self.replicas)].url + path
        if path == WEBSOCKET:
            return await _ask_websocket(url, headers, answer, BODY | body)
        sent = BODIES[path] | {"stream": stream} | body
        try:
            async with self.client.stream("POST", url, json=sent, headers=headers) as response:
                answer.status, answer.headers, answer.outcome = response.status_code, response.headers, "cut"
                answer.request_id = response.headers.get("x-request-id")
                content = await response.aread()
        except httpx.TransportError:
            return answer
        if response.status_code != 200:
            answer.outcome, answer.code = "refused", response.json()["error"]["code"]
            answer.told = response.json()["error"]["message"]
        elif not stream or b"[DONE]" in content:
            answer.outcome = "ok"
        return answer

    @contextlib.asynccontextmanager
    async def load(self, key: str, clients: int = 6) -> AsyncIterator[list[Answer]]:
        """Clients that ask again and again until the end of the block."""
        answers: list[Answer] = []
        ended = asyncio.Event()

        async def client(number: int) -> None:
            while not ended.is_set():
                answer = await self.ask(key, number, stream=number % 2 == 0)
                answers.append(answer)
                await asyncio.sleep(0.02 if answer.outcome == "ok" else 0.1)

        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(client(number))
            try:
                yield answers
            finally:
                ended.set()

    # -- looking

    async def rows(self, tenant: str) -> list[Any]:
        query = text(
            "SELECT usage_events.* FROM usage_events JOIN tenants ON tenants.id = tenant_id WHERE tenants.name = :name"
        )
        async with transaction(self.engine) as connection:
            return list(await connection.execute(query, {"name": tenant}))

    async def reservations(self, tenant_id: UUID) -> list[tuple[UUID, int, int]]:
        """Running requests with what they reserved, in nano-USD and tokens."""
        found = await self._snapshot(tenant_id)
        return [(each.request_id, each.bound_nano_usd, each.bound_tokens) for each in found.requests]

    async def budgets(self, tenant_id: UUID) -> tuple[BudgetCounter, ...]:
        return (await self._snapshot(tenant_id)).budgets

    async def _snapshot(self, tenant_id: UUID) -> TenantCounters:
        redis = create_redis(self.redis.url, timeout_s=5.0)
        try:
            return await snapshot(redis, tenant_id)
        finally:
            await redis.close()

    async def settled(self, *, limit_s: float = 30.0) -> Verification:
        """Wait until nothing runs and nothing is on its way, then verify."""
        redis = create_redis(self.redis.url, timeout_s=5.0)
        try:
            async with asyncio.timeout(limit_s):
                while await self._moving():  # noqa: ASYNC110 - in other processes
                    await asyncio.sleep(0.1)
            return await verify(redis, self.redis.url, self.engine, pauses_s=(0.5, 1.0, 1.0))
        finally:
            await redis.close()

    async def _moving(self) -> bool:
        async with asyncio_client(self.redis.url, timeout_s=5.0) as client:
            pipeline = client.pipeline(transaction=False)
            for shard in range(64):
                pipeline.exists(f"{{s{shard:02d}}}:leases")
                pipeline.xlen(f"{{s{shard:02d}}}:usage")
            return any(await pipeline.execute())

    async def verify_command(self) -> None:
        """`penstock verify`, as an operator runs it, finds no difference."""
        done = await asyncio.to_thread(
            subprocess.run,
            [BIN / "penstock", "verify"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)


async def _ask_websocket(url: str, headers: dict[str, str], answer: Answer, body: dict[str, Any]) -> Answer:
    address = url.replace("http", "ws", 1)
    async with connect(address, additional_headers=headers | {"x-penstock-heads": "1"}, open_timeout=60) as connection:
        await connection.send(json.dumps(body))
        head = json.loads(await connection.recv())
        answer.status, answer.request_id, answer.outcome = head["status"], head["headers"]["x-request-id"], "cut"
        async for text in connection:
            if text == "[DONE]":
                answer.outcome = "ok"
                break
            if (error := json.loads(text).get("error")) is not None:
                answer.outcome, answer.code, answer.told = "refused", error["code"], error["message"]
                break
    return answer


def _fields(limit: LimitSpec) -> dict[str, Any]:
    return {name: getattr(limit, name) for name in LimitSpec.__struct_fields__}


def count(answers: Sequence[Answer]) -> dict[str, int]:
    return {outcome: sum(a.outcome == outcome for a in answers) for outcome in ("ok", "refused", "cut", "unknown")}
