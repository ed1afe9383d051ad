from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.exceptions

from gateway.local.services import EmbeddedRedis
from gateway.redis_url import client as redis_client
from gateway.routing.load import LoadExchange
from gateway.routing.policy import Balancer
from tests.gateway.routing.support import Rig, endpoint
from tests.ports import free_port

A, B = endpoint("a"), endpoint("b")


@contextlib.asynccontextmanager
async def replica(url: str, *, every_s: float = 0.02, **more: Any) -> AsyncIterator[tuple[LoadExchange, Balancer]]:
    balancer = Rig(A, B).balancer
    async with LoadExchange(url, balancer, **({"timeout_s": 1.0} | more), every_s=every_s) as exchange:
        yield exchange, balancer


def elsewhere(balancer: Balancer) -> dict[str, int]:
    return {health.endpoint: health.in_flight_elsewhere for health in balancer.snapshot() if health.in_flight_elsewhere}


def overruled(balancer: Balancer) -> list[str]:
    return [health.endpoint for health in balancer.snapshot() if health.overruled]


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("server", ["redis_url", "redis_cluster_url"])
async def test_replicas_know_each_others_requests_and_votes(server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(server)
    async with replica(url) as (_, one), replica(url) as (_, two), replica(url) as (_, three):
        one.succeeded(A)
        one.succeeded(B)
        with two.using(A), two.using(A), three.using(A), three.using(B):
            await eventually(lambda: elsewhere(one) == {"a": 3, "b": 1})
        await eventually(lambda: elsewhere(one) == {})
        two.failed(A, unhealthy=True, unreachable=True)
        await asyncio.sleep(0.1)
        assert overruled(one) == []
        three.failed(A, unhealthy=True, unreachable=True)
        await eventually(lambda: overruled(one) == ["a"])


async def test_one_that_leaves_is_forgotten_at_once_and_one_that_dies_when_its_time_is_over(redis_url: str) -> None:
    async with replica(redis_url) as (_, one):
        one.succeeded(A)
        async with replica(redis_url) as (_, two):
            with two.using(A):
                await eventually(lambda: elsewhere(one) == {"a": 1})
        await eventually(lambda: elsewhere(one) == {})
        with redis_client(redis_url) as client:
            client.set("{fleet}:load:dead", msgspec.msgpack.encode([{"a": 7}, []]), px=300)
            client.sadd("{fleet}:replicas", "dead")
            await eventually(lambda: elsewhere(one) == {"a": 7})
            await eventually(lambda: elsewhere(one) == {})
            await eventually(lambda: b"dead" not in client.smembers("{fleet}:replicas"))
    with redis_client(redis_url) as client:
        assert client.keys("{fleet}:*") == []


STRANGE = [
    b"",
    b"\xc1",
    b"{}",
    msgspec.msgpack.encode(None),
    msgspec.msgpack.encode([{"a": -5}, []]),
    msgspec.msgpack.encode([{"a": 2**63}, []]),
    msgspec.msgpack.encode([{"a": float("nan")}, []]),
    msgspec.msgpack.encode([{1: 1}, []]),
    msgspec.msgpack.encode([{"a": 1}, "a"]),
    b"\x91" * 100_000,
]


async def test_what_is_not_understood_harms_nobody(redis_url: str) -> None:
    async with replica(redis_url) as (_, one), replica(redis_url) as (_, two):
        one.succeeded(A)
        with redis_client(redis_url) as client:
            for number, raw in enumerate(STRANGE):
                client.set(f"{{fleet}}:load:strange{number}", raw)
                client.sadd("{fleet}:replicas", f"strange{number}")
            client.sadd("{fleet}:replicas", b"\xff\xfe")
        with two.using(A):
            await eventually(lambda: elsewhere(one) == {"a": 1})


async def test_a_replica_of_a_later_release_may_tell_more(redis_url: str) -> None:
    async with replica(redis_url) as (_, one):
        one.succeeded(A)
        with redis_client(redis_url) as client:
            client.set("{fleet}:load:later", msgspec.msgpack.encode([{"a": 3}, ["b"], {"new": 1}]))
            client.sadd("{fleet}:replicas", "later")
        await eventually(lambda: elsewhere(one) == {"a": 3})


async def test_with_redis_away_own_figures_count_alone_and_it_recovers(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir, durable=False)
    url = service.start()
    try:
        async with replica(url, ttl_s=0.3) as (exchange, one), replica(url, ttl_s=0.3) as (_, two):
            one.succeeded(A)
            with two.using(A), one.using(A):
                await eventually(lambda: elsewhere(one) == {"a": 1})
                await asyncio.to_thread(service.stop)
                await eventually(lambda: elsewhere(one) == {})
                assert one.in_flight() == {"a": 1}
                with pytest.raises((redis.exceptions.RedisError, OSError)):
                    await exchange.exchange()
                await asyncio.to_thread(service.start)
                await eventually(lambda: elsewhere(one) == {"a": 1})
    finally:
        service.stop()


async def test_a_redis_that_hangs_holds_up_nobody() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    port = free_port()
    async with (
        await asyncio.start_server(hang, "127.0.0.1", port),
        asyncio.timeout(5),
        replica(f"redis://127.0.0.1:{port}/0", timeout_s=0.2) as (_, one),
    ):
        await asyncio.sleep(0.05)
        one.succeeded(A)
