"""What the cache stands on fails: a miss, soon, and never an error; and whoever runs the gateway is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, text

from gateway.datakeys import loading
from gateway.db.engine import create_engine
from gateway.db.tables import usage_events
from gateway.local.services import EmbeddedRedis
from gateway.policies.answer_cache import CachePolicy
from gateway.redis_url import client
from tests.gateway.admission.test_redis import hang
from tests.gateway.conftest import Gateway
from tests.gateway.http.cache_support import CHAT, Kept, asking, change, client_of, model


@pytest.fixture
def cache_redis(services_dir: Path) -> Iterator[EmbeddedRedis]:
    """The cache's own, which a test may hurt."""
    service = EmbeddedRedis(services_dir / "cache", durable=False)
    service.start()
    yield service
    service.stop()


@pytest.fixture
async def gateway(start_gateway: Any, cache_redis: EmbeddedRedis, upstream: Any) -> AsyncIterator[Gateway]:
    settings = {"connect_timeout_s": 20.0, "redis_timeout_s": 10.0}
    async with start_gateway(cache_redis_url=cache_redis.url, **settings) as running:
        await running.register(await upstream(model))
        await change(running, CachePolicy(mode="exact"))
        yield running


async def outcome(http: httpx.AsyncClient, said: str = "Faults?") -> str:
    answer = await http.post(CHAT, json=asking(said))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-penstock-cache"]


async def until(http: httpx.AsyncClient, wanted: str, said: str = "Faults?") -> None:
    async with asyncio.timeout(15):
        while await outcome(http, said) != wanted:  # noqa: ASYNC110 - the cache tells no event
            await asyncio.sleep(0.05)


async def told(http: httpx.AsyncClient, begin: str) -> None:
    async with asyncio.timeout(10):
        while True:
            answer = await http.get("/readyz")
            assert answer.status_code == 200  # the cache keeps no gateway from being ready
            if answer.json()["answer_cache"].startswith(begin):
                return
            await asyncio.sleep(0.1)


async def test_redis_hangs_dies_and_comes_back(gateway: Any, cache_redis: EmbeddedRedis) -> None:
    async with client_of(gateway) as http:
        await until(http, "exact")
        await told(http, "ok")
        hang(cache_redis)
        try:
            asked = [await outcome(http, f"Hung? {number}") for number in range(5)]
            assert set(asked) == {"unavailable"}
            await told(http, "unavailable")
        finally:
            hang(cache_redis, False)
        await until(http, "exact")
        cache_redis.kill()
        assert {await outcome(http, f"Dead? {number}") for number in range(5)} == {"unavailable"}
        await told(http, "unavailable")
        cache_redis.start()
        await until(http, "exact")
        await told(http, "ok")
        with client(cache_redis.url) as redis:
            redis.flushall()
        await until(http, "exact", "Faults?")
    rows = await gateway._rows()
    assert {row.status for row in rows} <= {"ok", "cache_hit"}


async def test_a_full_redis_still_answers_and_forgets(gateway: Any, cache_redis: EmbeddedRedis) -> None:
    admin = {"authorization": f"Bearer {gateway.admin_key}"}
    async with client_of(gateway) as http:
        await until(http, "exact")
        with client(cache_redis.url) as redis:
            redis.config_set("maxmemory", 1)
        for number in range(5):
            assert await outcome(http, f"Full? {number}") in ("miss", "unavailable")
            await until(http, "exact")
        await told(http, "keeps nothing: RedisUnavailable: OOM")
        purged = await http.post("/admin/v1/cache/purge", json={"tenant": "acme"}, headers=admin)
        assert (purged.status_code, purged.json()) == (200, {"purged": 1})
        assert not Kept(cache_redis.url).names()
        with client(cache_redis.url) as redis:
            redis.config_set("maxmemory", 0)
        await until(http, "exact")
        await told(http, "ok")


async def test_erased_keys_and_a_database_that_is_away_make_misses(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "CACHE_S", 0.3)
    async with client_of(gateway) as http:
        await until(http, "exact")
        async with gateway.engine.begin() as connection:
            await connection.execute(text("DELETE FROM data_keys"))
        async with asyncio.timeout(15):
            while await outcome(http) == "exact":  # noqa: ASYNC110 - at most as long as keys are remembered
                await asyncio.sleep(0.2)
        await until(http, "exact")
        async with gateway.engine.begin() as connection:
            await connection.execute(text("ALTER TABLE data_keys RENAME TO away"))
        async with asyncio.timeout(15):
            while await outcome(http) != "unavailable":  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.2)
        async with gateway.engine.begin() as connection:
            await connection.execute(text("ALTER TABLE away RENAME TO data_keys"))
        await until(http, "exact")


async def test_a_stop_settles_those_that_follow(start_gateway: Any, upstream: Any) -> None:
    asked = asyncio.Event()

    async def never(c: Any) -> None:
        asked.set()
        await c.wait_closed_by_peer(20)

    async with client_of_nobody() as http:
        async with start_gateway(keepalive_s=0.1, redis_timeout_s=10.0) as gateway:
            await gateway.register(await upstream(never))
            await change(gateway, CachePolicy(mode="exact", single_flight=True))
            headers = {"authorization": f"Bearer {gateway.key}"}
            url, ask = gateway.url + CHAT, asking("Stopped?")
            tasks = [asyncio.ensure_future(http.post(url, json=ask, headers=headers))]
            async with asyncio.timeout(5):
                await asked.wait()
            for stream in (False, True):
                tasks.append(asyncio.ensure_future(http.post(url, json=ask | {"stream": stream}, headers=headers)))
            await asyncio.sleep(0.5)
        answers = await asyncio.gather(*tasks)
        assert all("gateway_stopping" in answer.text for answer in answers)
    engine = create_engine(gateway.settings.database_url, pool_size=1)
    async with engine.connect() as connection:
        rows = list(await connection.execute(select(usage_events)))
    await engine.dispose()
    assert [(row.status, row.error_code, row.charged_nano_usd) for row in rows] == [
        ("failed", "gateway_stopping", 0)
    ] * 3


def client_of_nobody() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=20)
