"""Heartbeats against a gateway's registry that fails, forgets and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from worker.protocol.fleet import Registered, WorkerRecord
from worker.server.registration import Registration

TOKEN = "fleet-token-of-these-tests"


@dataclass
class Gateway:
    """What a gateway does with heartbeats, and what it saw."""

    url: str = ""
    status: int = 200
    hangs: bool = False
    tokens: set[str | None] = field(default_factory=set)
    seen: list[WorkerRecord] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        self.tokens.add(request.headers.get("authorization"))
        if self.status == 200:
            record = msgspec.json.decode(await request.read(), type=WorkerRecord)
            assert record.worker_id == request.match_info["id"]
            self.seen.append(record)
            self.news.set()
        return web.Response(status=self.status, body=msgspec.json.encode(Registered(ttl_s=5.0)))

    async def delete(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("authorization"))
        self.withdrawn.append(request.match_info["id"])
        return web.Response(status=204)

    async def next(self, limit_s: float = 10.0) -> WorkerRecord:
        self.news.clear()
        async with asyncio.timeout(limit_s):
            await self.news.wait()
        return self.seen[-1]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    app = web.Application()
    app.router.add_put("/internal/v1/workers/{id}", gateway.put)
    app.router.add_delete("/internal/v1/workers/{id}", gateway.delete)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    gateway.url = f"http://{host}:{port}"
    yield gateway
    await runner.cleanup()


def record(running: int = 0) -> WorkerRecord:
    return WorkerRecord(
        worker_id="w-1", pool="p", base_url="http://127.0.0.1:1", model="m", context_length=99, running=running
    )


@contextlib.asynccontextmanager
async def running(registration: Registration) -> AsyncIterator[asyncio.Future[None]]:
    beating = asyncio.ensure_future(registration.run())
    try:
        yield beating
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def test_it_registers_at_once_and_tells_the_load_again_and_again(gateway: Gateway) -> None:
    load = iter(range(100))
    latest = [record()]

    def now() -> WorkerRecord:
        latest[0] = record(next(load))
        return latest[0]

    async with running(Registration(gateway.url + "/", TOKEN, now, interval_s=0.02)):
        first = await gateway.next()
        later = [await gateway.next() for _ in range(3)]
    assert [r.running for r in later] > [first.running] * 3
    assert later[-1].context_length == 99
    assert gateway.tokens == {f"Bearer {TOKEN}"}
    assert gateway.withdrawn == []


async def test_it_comes_back_after_every_kind_of_trouble(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(Registration(gateway.url, TOKEN, record, interval_s=0.02)):
        await gateway.next()
        for status in (503, 401, 404):
            gateway.status = status
            await asyncio.sleep(0.1)
            gateway.status = 200
            await gateway.next()
            await gateway.next()  # by now the one before has been answered, and told
    said = capsys.readouterr().out
    assert said.count("not registered") == 3
    assert said.count("registered with the gateway") - said.count("not registered") == 4
    assert "PENSTOCK_FLEET_TOKEN" in said
    assert TOKEN not in said


async def test_a_gateway_that_is_not_there_yet_is_waited_for(gateway: Gateway) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    await runner.cleanup()
    async with running(Registration(f"http://127.0.0.1:{port}", TOKEN, record, interval_s=0.01)):
        await asyncio.sleep(0.1)
        app = web.Application()
        app.router.add_put("/internal/v1/workers/{id}", gateway.put)
        late = web.AppRunner(app)
        await late.setup()
        await web.TCPSite(late, "127.0.0.1", port).start()
        assert (await gateway.next()).worker_id == "w-1"
        await late.cleanup()


async def test_news_do_not_wait_for_the_next_heartbeat(gateway: Gateway) -> None:
    load = [1]
    registration = Registration(gateway.url, TOKEN, lambda: record(load[0]), interval_s=60)
    async with running(registration):
        assert (await gateway.next()).running == 1
        for load[0] in (2, 3):
            registration.beat_now()
            assert (await gateway.next(5)).running == load[0]


async def test_it_withdraws(gateway: Gateway) -> None:
    await Registration(gateway.url, TOKEN, record).withdraw()
    assert gateway.withdrawn == ["w-1"]
    assert gateway.tokens == {f"Bearer {TOKEN}"}


async def test_withdrawing_from_a_gateway_that_is_gone_does_not_hold_the_worker_up() -> None:
    async with asyncio.timeout(5):
        await Registration("http://127.0.0.1:9", TOKEN, record).withdraw()


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 64}", "http://[", "http://x:99999"])
async def test_a_url_that_can_not_be_called_is_trouble_like_any_other(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    registration = Registration(url, TOKEN, record, interval_s=0.01)
    async with running(registration) as beating:
        await asyncio.sleep(0.05)
        assert not beating.done()
    await registration.withdraw()
    said = capsys.readouterr().out
    assert said.count("not registered") == 1
    assert "could not withdraw" in said


@pytest.mark.parametrize("turns", range(8))
async def test_it_ends_also_when_news_come_with_the_cancellation(gateway: Gateway, turns: int) -> None:
    registration = Registration(gateway.url, TOKEN, record, interval_s=60)
    beating = asyncio.ensure_future(registration.run())
    await gateway.next()
    await asyncio.sleep(0.05)
    registration.beat_now()
    for _ in range(turns):
        await asyncio.sleep(0)
    beating.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({beating})
