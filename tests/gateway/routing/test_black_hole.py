"""Backends that answer nothing, among others that do: who notices, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.routing.breaker import FAILURES_IN_A_ROW
from tests.gateway.backends.relay_support import black_hole
from tests.gateway.conftest import Conversation, GatewayFactory, Upstream, UpstreamFactory
from tests.gateway.routing.app_support import Site, answer, asked, never, probed
from tests.ports import free_port

FIRST_BYTE_S = 0.5
AT_ONCE = 8


@pytest.fixture
async def site(start_gateway: GatewayFactory, upstream: UpstreamFactory) -> AsyncIterator[Site]:
    async with (
        start_gateway(probe_interval_s=5.0) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30.0) as client,
    ):
        yield Site(gateway, upstream, client)


async def soon(c: Conversation) -> None:
    await asyncio.sleep(0.02)
    await answer(c)


class Load:
    """Clients that ask a model one after the other."""

    def __init__(self, site: Site, model: str) -> None:
        self.site = site
        self.model = model
        self.answers: list[tuple[float, httpx.Response]] = []

    async def ask(self, times: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(times):
            began = loop.time()
            response = await self.site.ask(self.model)
            assert response.status_code == 200, response.text
            self.answers.append((loop.time() - began, response))

    async def run(self, requests: int) -> Load:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self.ask(requests // AT_ONCE))
        return self

    async def latencies(self, *, attempts: int = 1) -> list[float]:
        """Of the requests that took so many attempts, in order."""
        rows = await self.site.rows([response for _, response in self.answers])
        pairs = zip(self.answers, rows, strict=True)
        return sorted(seconds for (seconds, _), row in pairs if row.attempts == attempts)


async def beside_three(site: Site, name: str, url: str, **limits: float) -> list[Upstream]:
    await site.pool(name)
    good = [await site.serve(soon) for _ in range(3)]
    for number, server in enumerate(good):
        await site.declare(f"{name}-{number}", name, server.url)
    await site.declare(f"{name}-hole", name, url, **limits)
    await site.route(name, name)
    return good


async def test_one_of_four_is_a_black_hole_and_the_others_do_not_notice(site: Site) -> None:
    hole = await site.serve(never)
    await site.pool("well")
    for number in range(3):
        await site.declare(f"well-{number}", "well", (await site.serve(soon)).url)
    await site.route("well", "well")
    await beside_three(site, "hole", hole.url, first_byte_timeout_s=FIRST_BYTE_S)
    async with black_hole() as nowhere:
        await beside_three(site, "nowhere", nowhere, connect_timeout_s=0.3)
        await site.known("well")
        await Load(site, "well").run(16)  # connections, caches

        before = await (await Load(site, "well").run(80)).latencies()
        load = Load(site, "hole")
        # As long as it takes until the breaker opens: those that hit it wait for the first-byte limit, and are served.
        async with asyncio.timeout(20):
            while asked(hole) < FAILURES_IN_A_ROW:
                await load.run(AT_ONCE * 2)
        beside = await load.latencies()
        assert len(beside) >= 20
        assert beside[len(beside) // 2] < before[len(before) // 2] * 3 + 0.15
        assert beside[int(len(beside) * 0.99)] < before[int(len(before) * 0.99)] * 3 + 0.4
        hit = await load.latencies(attempts=2)
        assert len(hit) >= FAILURES_IN_A_ROW
        assert hit[0] >= FIRST_BYTE_S

        hits = asked(hole)
        after = await (await Load(site, "hole").run(40)).latencies()
        assert asked(hole) <= hits + 1  # one trial, should the cool-down be over
        assert len(after) >= 39
        assert after[len(after) // 2] < before[len(before) // 2] * 3 + 0.15

        # Where not even a connection comes about, one failure is enough.
        load = await Load(site, "nowhere").run(80)
        assert len(await load.latencies(attempts=2)) <= AT_ONCE + 1
        assert (await load.latencies())[40] < before[len(before) // 2] * 3 + 0.15


async def test_with_all_four_down_the_answer_comes_by_the_deadline(site: Site) -> None:
    silent = await site.serve(never)
    async with black_hole() as nowhere:
        for name, deadline_s in (("quick", 30.0), ("slow", 1.0)):
            limits = {"connect_timeout_s": 0.2, "first_byte_timeout_s": 0.5} if name == "quick" else {}
            await site.pool(name)
            for number, url in enumerate(
                [f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}", nowhere, silent.url]
            ):
                await site.declare(f"{name}-{number}", name, url, priority=number, **limits)
            await site.route(name, name, timeout_s=deadline_s)
        await site.known("quick")
        loop = asyncio.get_running_loop()
        began = loop.time()
        quick, slow, stream = await asyncio.gather(site.ask("quick"), site.ask("slow"), site.ask("slow", stream=True))
        assert loop.time() - began < 1.0 + 2.0
    assert (quick.status_code, quick.json()["error"]["code"]) == (504, "backend_timeout")
    for response in (slow, stream):
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    rows = await site.rows([quick, slow, stream])
    assert [row.attempts for row in rows[:1]] == [4]
    assert [row.charged_nano_usd for row in rows] == [0, 0, 0]
    assert [text.split()[1] for text in rows[0].failed_attempts] == [
        "no_backend_available",
        "no_backend_available",
        "no_backend_available",
        "backend_timeout",
    ]


async def test_probes_tell_of_a_death_and_a_return_before_any_request_does(
    start_gateway: GatewayFactory, upstream: UpstreamFactory
) -> None:
    port = free_port()
    returned = Upstream([probed(answer)], port=port)
    async with (
        start_gateway(probe_interval_s=0.2) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30.0) as client,
    ):
        site = Site(gateway, upstream, client)
        await site.pool("p")
        await site.declare("returns", "p", f"http://127.0.0.1:{port}")
        await site.route("r", "p")
        await site.known("p")

        async def breaker(level: int) -> None:
            line = f'penstock_backend_breaker{{backend="returns"}} {level}.0'
            async with asyncio.timeout(10):
                while line not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - a gauge tells no event
                    await asyncio.sleep(0.05)

        await breaker(2)
        await returned.start()
        try:
            await breaker(1)
            assert asked(returned) == 0
            response = await site.ask("r")
            assert response.status_code == 200, response.text
            await breaker(0)
            assert asked(returned) == 1
        finally:
            await returned.stop()
