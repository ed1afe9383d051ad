from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.local.services import EmbeddedRedis
from gateway.redis_url import client as redis_client
from gateway.routing.registry import Registry, RegistryUnavailable
from tests.ports import free_port
from tests.redis_cluster import RedisCluster
from worker.protocol.fleet import WorkerRecord


def record(worker_id: str = "w1", pool: str = "pool", **more: Any) -> WorkerRecord:
    values = {"base_url": f"http://{worker_id}:8100", "model": "m", "context_length": 10}
    return WorkerRecord(worker_id=worker_id, pool=pool, **(values | more))


def make(url: str, *, ttl_s: float = 30.0, refresh_s: float = 60.0) -> Registry:
    return Registry(url, ttl_s=ttl_s, timeout_s=1.0, refresh_s=refresh_s)


def ids(registry: Registry, pool: str = "pool") -> list[str]:
    return [endpoint.id for endpoint in registry.endpoints(pool)]


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_worker_is_known_at_once_here_and_soon_elsewhere(redis_url: str) -> None:
    async with make(redis_url) as here, make(redis_url, refresh_s=0.02) as there:
        await here.register(record("w2"))
        await here.register(record("w1"))
        await here.register(record("w3", "other"))
        assert ids(here) == ["w1", "w2"]
        assert ids(here, "other") == ["w3"]
        await eventually(lambda: ids(there) == ["w1", "w2"] and ids(there, "other") == ["w3"])
        await there.withdraw("w1")
        assert ids(there) == ["w2"]
        await here.refresh()
        assert ids(here) == ["w2"]


async def test_a_replica_that_starts_knows_the_workers_at_once(redis_url: str) -> None:
    async with make(redis_url) as here:
        await here.register(record())
        async with make(redis_url) as late:
            assert ids(late) == ["w1"]


async def test_a_silent_worker_is_gone_after_its_time_and_leaves_nothing_behind(redis_url: str) -> None:
    async with make(redis_url, ttl_s=0.1) as registry:
        await registry.register(record())
        await asyncio.sleep(0.2)
        await registry.refresh()
        assert ids(registry) == []
    with redis_client(redis_url) as client:
        assert client.smembers("{fleet}:pool:pool") == set()


async def test_a_draining_worker_is_known_but_takes_no_requests(redis_url: str) -> None:
    async with make(redis_url) as registry:
        await registry.register(record(draining=True))
        assert ids(registry) == []
        assert [worker.worker_id for worker in registry.workers()] == ["w1"]


async def test_a_worker_may_change_its_pool_and_its_address(redis_url: str) -> None:
    async with make(redis_url) as registry:
        await registry.register(record(pool="old"))
        await registry.register(record(base_url="http://new:1"))
        await registry.refresh()
        assert ids(registry, "old") == []
        assert [endpoint.base_url for endpoint in registry.endpoints("pool")] == ["http://new:1"]


async def test_an_unreadable_record_harms_no_other(redis_url: str) -> None:
    async with make(redis_url) as registry:
        await registry.register(record("w1"))
        await registry.register(record("w2"))
        with redis_client(redis_url) as client:
            client.set("{fleet}:worker:w1", b'{"worker_id": 5')
        await registry.refresh()
        assert ids(registry) == ["w2"]


async def test_with_redis_away_the_last_copy_serves_and_it_recovers(services_dir: Any) -> None:
    service = EmbeddedRedis(services_dir, durable=False)
    url = service.start()
    try:
        async with make(url, refresh_s=0.05) as registry:
            await registry.register(record())
            await asyncio.to_thread(service.stop)
            with pytest.raises(RegistryUnavailable):
                await registry.refresh()
            with pytest.raises(RegistryUnavailable):
                await registry.register(record("w2"))
            await asyncio.sleep(0.2)
            assert ids(registry) == ["w1"]
            await asyncio.to_thread(service.start)
            await registry.register(record("w2"))
            await eventually(lambda: "w2" in ids(registry))
    finally:
        service.stop()


async def test_a_redis_that_hangs_is_given_up_in_time() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(hang, "127.0.0.1", port):
        registry = Registry(f"redis://127.0.0.1:{port}/0", ttl_s=1, timeout_s=0.2, refresh_s=60)
        async with asyncio.timeout(3), registry:
            with pytest.raises(RegistryUnavailable):
                await registry.refresh()


async def test_a_large_fleet_at_once_shares_few_connections(redis_url: str) -> None:
    """redis-py's own pool refuses the 101st."""
    async with make(redis_url) as one:
        await asyncio.gather(*(one.register(record(f"w{number}")) for number in range(150)))
        assert len(one.workers()) == 150


async def test_a_cluster_keeps_the_records_through_the_death_of_their_node(services_dir: Any) -> None:
    cluster = RedisCluster(services_dir, durable=True)
    await asyncio.to_thread(cluster.start)
    node = cluster.owner(int(cluster.nodes[0].ask("CLUSTER", "KEYSLOT", "{fleet}")))
    try:
        async with make(cluster.url) as here, make(cluster.url, refresh_s=0.05) as there:
            await asyncio.gather(*(here.register(record(f"w{number}")) for number in range(20)))
            await eventually(lambda: len(ids(there)) == 20)
            await here.withdraw("w0")
            await eventually(lambda: len(ids(there)) == 19)
            await asyncio.to_thread(node.kill)
            with pytest.raises(RegistryUnavailable):
                await here.refresh()
            assert len(ids(there)) == 19
            await asyncio.to_thread(node.start)
            # A node that restarts lets a second pass before it serves its slots again.
            await eventually_refreshed(here)
            await here.register(record("w0"))
            await eventually(lambda: len(ids(there)) == 20)
    finally:
        await asyncio.to_thread(cluster.stop)


async def eventually_refreshed(registry: Registry) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                return await registry.refresh()
            except RegistryUnavailable:
                await asyncio.sleep(0.05)
