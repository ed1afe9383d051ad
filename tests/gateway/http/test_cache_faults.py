"""What the cache stands on fails: a miss, soon, and never an error; and whoever runs the gateway is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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


async def outcome(http: httpx.AsyncClient, text: str = "Faults?") -> str:
    answer = await http.post(CHAT, json=asking(text))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-penstock-cache"]


async def until(http: httpx.AsyncClient, wanted: str, text: str = "Faults?") -> None:
    async with asyncio.timeout(15):
        while await outcome(http, text) != wanted:  # noqa: ASYNC110 - the cache tells no event
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
