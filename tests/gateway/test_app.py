"""The whole gateway through outages of what it stands on, and through its own stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from gateway.db.migrate import upgrade
from gateway.local.services import EmbeddedPostgres, EmbeddedRedis
from tests.gateway.tenants.support import ACTOR, concurrent, requests_per_minute

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def paris(c: Any) -> None:
    if c.body.get("stream"):
        await c.begin()
        await c.token("Paris", 1)
        await c.done()
    else:
        await c.whole()


def client_of(gateway: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}, timeout=httpx.Timeout(20)
    )


def told_to_retry(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


async def until_unready(client: httpx.AsyncClient, service: str) -> None:
    async with asyncio.timeout(5):
        while (answer := await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110 - tells no event
            await asyncio.sleep(0.1)
    assert (answer.status_code, answer.json()[service]) == (503, "unavailable")


async def until_served(client: httpx.AsyncClient, *, within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while (await client.post(PATH, json=ASK)).status_code != 200:  # noqa: ASYNC110 - recovery tells no event
            await asyncio.sleep(0.1)


async def until_asked(server: Any, times: int) -> None:
    async with asyncio.timeout(15):
        while len(server.seen) < times:  # noqa: ASYNC110 - a backend tells no event
            await asyncio.sleep(0.02)


@pytest.fixture
async def own_redis(services_dir: Path) -> AsyncIterator[EmbeddedRedis]:
    service = EmbeddedRedis(services_dir / "redis")
    await asyncio.to_thread(service.start)
    yield service
    await asyncio.to_thread(service.stop)


@pytest.fixture
async def own_postgres(services_dir: Path) -> AsyncIterator[EmbeddedPostgres]:
    # Durable, since tests kill it: what it had acknowledged must still be there.
    service = EmbeddedPostgres(services_dir / "postgres")
    await asyncio.to_thread(lambda: upgrade(service.start()))
    yield service
    await asyncio.to_thread(service.stop)


async def test_redis_away_is_a_clear_answer_and_no_restart_is_needed(
    start_gateway: Callable[..., Any], upstream: Any, own_redis: EmbeddedRedis
) -> None:
    go_on = asyncio.Event()

    async def streams(c: Any) -> None:
        if not c.body.get("stream"):
            await paris(c)
            return
        await c.begin()
        await c.token("Par", 1)
        await go_on.wait()
        await c.token("is", 2)
        await c.done()

    limits = [concurrent(5), requests_per_minute(1000)]
    async with start_gateway(redis_url=own_redis.url, limits=limits) as gateway, client_of(gateway) as client:
        server = await upstream(streams)
        await gateway.register(server)
        async with client.stream("POST", PATH, json=ASK | {"stream": True}) as running:
            pieces = running.aiter_text()
            assert "Par" in await anext(pieces)
            await asyncio.to_thread(own_redis.stop)
            loop = asyncio.get_running_loop()
            began = loop.time()
            told_to_retry(await client.post(PATH, json=ASK))
            assert loop.time() - began < 3.0
            assert (await client.get("/healthz")).status_code == 200
            await until_unready(client, "redis")
            go_on.set()  # what was admitted goes on without Redis
            rest = "".join([piece async for piece in pieces])
            assert "[DONE]" in rest
        await asyncio.to_thread(own_redis.start)
        await gateway.register(server)
        await until_served(client)
        rows = await gateway.rows(2, within_s=10.0)
        assert [row.status for row in rows] == ["ok", "ok"]
        assert [row.completion_tokens for row in rows] == [2, 3]


UNKNOWN = "sk-penstock-" + "a" * 12 + "-" + "b" * 43
"""A key that nobody has asked about."""


async def test_with_postgres_away_known_keys_are_served_others_told_to_retry_and_nothing_is_lost(
    start_gateway: Callable[..., Any], upstream: Any, own_postgres: EmbeddedPostgres
) -> None:
    async with (
        start_gateway(database_url=own_postgres.url, principal_cache_s=0.5) as gateway,
        client_of(gateway) as client,
    ):
        await gateway.register(await upstream(paris))
        assert (await client.post(PATH, json=ASK)).status_code == 200
        await gateway.rows(1)
        await asyncio.to_thread(own_postgres.kill)
        served = 20
        for _ in range(served):
            assert (await client.post(PATH, json=ASK)).status_code == 200
            await asyncio.sleep(0.1)  # in all, longer than anything is cached
        told_to_retry(await client.post(PATH, json=ASK, headers={"authorization": f"Bearer {UNKNOWN}"}))
        assert (await client.get("/healthz")).status_code == 200
        await until_unready(client, "postgres")
        await asyncio.to_thread(own_postgres.start)
        await until_served(client)
        rows = await gateway.rows(1 + served + 1, within_s=10.0)
        assert {row.status for row in rows} == {"ok"}


async def test_reports_that_take_long_keep_nobodys_key_waiting(start_gateway: Callable[..., Any]) -> None:
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage_rollup'::regclass")
    async with start_gateway() as gateway, client_of(gateway) as client, asyncio.TaskGroup() as tasks:
        new_key, _ = await gateway.directory.create_key(ACTOR, "acme", "new")
        async with gateway.engine.begin() as connection:
            await connection.execute(text("LOCK TABLE usage_rollup IN ACCESS EXCLUSIVE MODE"))
            as_admin = {"authorization": f"Bearer {gateway.admin_key}"}
            for _ in range(12):
                tasks.create_task(client.get("/admin/v1/usage", headers=as_admin))
            async with asyncio.timeout(5):
                while await connection.scalar(waiting) < 2:  # noqa: ASYNC110 - a lock tells no event
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)  # for the others
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {new_key}"})
            assert answer.status_code == 200, answer.text


async def test_a_stop_lets_streams_end_and_breaks_off_those_that_do_not(
    start_gateway: Callable[..., Any], upstream: Any
) -> None:
    async def endless(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await c.wait_closed_by_peer(within_s=20)

    async def ends(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await told_to_stop.wait()
        await asyncio.sleep(0.2)
        await c.token("is", 2)
        await c.done()

    told_to_stop = asyncio.Event()
    async with start_gateway() as gateway:
        server = await upstream(ends, endless)
        await gateway.register(server)
        async with client_of(gateway) as client, asyncio.TaskGroup() as tasks:

            async def read() -> str:
                return (await client.post(PATH, json=ASK | {"stream": True})).text

            short = tasks.create_task(read())
            await until_asked(server, 1)
            long = tasks.create_task(read())
            await until_asked(server, 2)
            gateway.server.should_exit = True
            told_to_stop.set()
        assert short.result().endswith("data: [DONE]\n\n")
        *_, last = [part for part in long.result().split("\n\n") if part]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "gateway_stopping"
        # Both rows are in the ledger by the time the gateway has stopped.
        await gateway.server.stopped.wait()
        rows = await gateway.rows(2)
        assert sorted((row.status, row.error_code) for row in rows) == [
            ("failed", "gateway_stopping"),
            ("ok", None),
        ]
        assert {row.completion_tokens for row in rows} == {1, 2}


async def test_two_replicas_share_limits_and_workers(start_gateway: Callable[..., Any], upstream: Any) -> None:
    import uvicorn

    from gateway.app import create_app  # the second replica, in the same loop

    async with start_gateway(limits=[requests_per_minute(3)]) as first:
        await first.register(await upstream(paris))
        config = uvicorn.Config(create_app(first.settings), port=0, lifespan="on", log_config=None, ws="none")
        server = type(first.server)(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with client_of(first) as client:
                urls = [first.url + PATH, f"http://127.0.0.1:{port}{PATH}"]
                async with asyncio.timeout(5):
                    # Its copy of the registry is refreshed twice a second.
                    while (await client.get(f"http://127.0.0.1:{port}/readyz")).json()["backends"] == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                statuses = [(await client.post(urls[number % 2], json=ASK)).status_code for number in range(6)]
            server.should_exit = True
        assert statuses == [200, 200, 200, 429, 429, 429]
        await first.rows(3)
