from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.admission.redis import ClusterRedis, RedisUnavailable, Script, create_redis, load_script
from gateway.admission.redis_cluster import slot_of
from tests.redis_cluster import PASSWORD, ClusterNode, RedisCluster

COUNT = Script("count", b"return redis.call('INCR', KEYS[1])", b"0" * 40)
SHARDS = [f"{{s{number:02d}}}" for number in range(64)]


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster of this file's own, to be stopped, hung and moved about; each test leaves all nodes running."""
    cluster = RedisCluster(tmp_path_factory.mktemp("own_cluster"), durable=True)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def redis(own_cluster: RedisCluster) -> AsyncIterator[ClusterRedis]:
    client = ClusterRedis(own_cluster.url, timeout_s=2, scripts=(COUNT,))
    yield client
    await client.close()


_taken: set[str] = set()


def key_of(cluster: RedisCluster, node: ClusterNode, name: str) -> str:
    """A key of a shard that ``node`` serves and no test had before: of one that was moved the nodes may still tell each
    other what is over."""
    shard = next(shard for shard in SHARDS if shard not in _taken and cluster.owner(slot_of(shard)) is node)
    _taken.add(shard)
    return f"{shard}:{name}"


def test_slots_are_those_of_redis(redis_cluster: RedisCluster) -> None:
    node = redis_cluster.nodes[0]
    for key in ["a", "{s00}:usage", "{}{x}", "a{b}c{d}", "{", "}{", "x{}y", "schlüssel", "{é}1", "{{a}}"]:
        assert slot_of(key) == slot_of(key.encode()) == node.ask("CLUSTER", "KEYSLOT", key), key


async def test_replies_come_to_those_who_asked_on_any_node(redis_cluster_url: str) -> None:
    client = create_redis(redis_cluster_url, timeout_s=2)
    await asyncio.gather(*(client.command("SET", f"{shard}:n", shard) for shard in SHARDS))
    replies = await asyncio.gather(*(client.command("GET", f"{shard}:n") for shard in SHARDS * 20))
    assert replies == [shard.encode() for shard in SHARDS * 20]
    assert await asyncio.gather(*(client.run(COUNT, (f"{shard}:c",), ()) for shard in SHARDS)) == [1] * len(SHARDS)
    assert len(await client.command("TIME")) == 2
    assert len(await client.command_at("{s00}:c", "TIME")) == 2
    await client.close()
    with pytest.raises(RedisUnavailable):
        await client.command("GET", "a")


async def test_one_living_seed_is_enough(redis_cluster: RedisCluster) -> None:
    port = redis_cluster.nodes[1].port
    client = ClusterRedis(f"redis+cluster://:{PASSWORD}@127.0.0.1:1,localhost:{port}", timeout_s=2)
    assert await asyncio.gather(*(client.command("EXISTS", f"{shard}:nothing") for shard in SHARDS)) == [0] * 64
    assert {node.address.port for node in client._nodes.values()} == {node.port for node in redis_cluster.nodes}
    await client.close()


async def test_no_seed_answers() -> None:
    client = ClusterRedis("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=2)
    for _ in range(2):
        with pytest.raises(RedisUnavailable, match="cluster") as caught:
            await client.command("GET", "a")
        assert caught.value.unsent
    await client.close()


async def test_a_server_that_is_no_cluster_is_refused(own_redis_url: str) -> None:
    client = ClusterRedis(own_redis_url.replace("redis://", "redis+cluster://"), timeout_s=2)
    with pytest.raises(RedisUnavailable):
        await client.command("GET", "a")
    await client.close()


@pytest.fixture
def own_redis_url(request: pytest.FixtureRequest) -> str:
    if os.environ.get("TEST_REDIS_URL"):
        pytest.skip("needs the embedded Redis")
    return str(request.getfixturevalue("redis_url"))


async def test_told_once_at_first_and_again_when_a_node_is_connected_anew(own_cluster: RedisCluster) -> None:
    told: list[None] = []
    client = ClusterRedis(own_cluster.url, timeout_s=2, on_connected=lambda: told.append(None))
    await asyncio.gather(*(client.command("GET", shard) for shard in SHARDS))
    assert len(told) == 1
    node = own_cluster.nodes[2]
    node.ask("CLIENT", "KILL", "TYPE", "normal")
    key = key_of(own_cluster, node, "x")
    async with asyncio.timeout(20):
        while len(told) < 2:
            await asyncio.gather(client.command("GET", key), return_exceptions=True)
    await client.close()


async def test_a_moved_slot_is_followed(own_cluster: RedisCluster, redis: ClusterRedis) -> None:
    source, target, _ = own_cluster.nodes
    key = key_of(own_cluster, source, "moved")
    slot = slot_of(key)
    await redis.command("GET", key)
    own_cluster.assign(slot, target)
    asked = [redis.run(COUNT, (key,), ()) for _ in range(5)]
    assert await asyncio.gather(*asked) == [1, 2, 3, 4, 5]
    assert target.ask("GET", key) == "5"


@pytest.mark.parametrize("known", [True, False])
async def test_a_slot_on_its_way_is_asked_for_at_both_ends(
    own_cluster: RedisCluster, redis: ClusterRedis, known: bool
) -> None:
    source, target, _ = own_cluster.nodes
    key = key_of(own_cluster, source, "migrating" if known else "migrating too")
    slot = slot_of(key)
    await redis.command("GET", key)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    if not known:
        target.ask("SCRIPT", "FLUSH")
    script = Script("count", COUNT.source, load_script("renew").sha if not known else COUNT.sha)
    assert await redis.run(script, (key,), ()) == 1
    assert await redis.run(script, (key,), ()) == 2
    own_cluster.assign(slot, target)
    assert target.ask("GET", key) == "2"


async def test_keys_on_both_ends_of_a_move_are_asked_for_until_time_is_up(own_cluster: RedisCluster) -> None:
    source, target, _ = own_cluster.nodes
    here = key_of(own_cluster, source, "here")
    there = here.replace("here", "there")
    slot = slot_of(here)
    redis = ClusterRedis(own_cluster.url, timeout_s=0.5)
    await redis.command("SET", here, "1")
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    try:
        waiting = redis.command_at(here, "MGET", here, there)
        with pytest.raises(RedisUnavailable):
            await waiting
        patient = ClusterRedis(own_cluster.url, timeout_s=20)
        waiting = patient.command_at(here, "MGET", here, there)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        assert await waiting == [b"1", None]
        await patient.close()
    finally:
        for node in (source, target):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        await redis.command("DEL", here)
        await redis.close()


async def test_a_hung_node_holds_up_only_its_own_shards(own_cluster: RedisCluster) -> None:
    hung, well, _ = own_cluster.nodes
    at_hung, at_well = key_of(own_cluster, hung, "x"), key_of(own_cluster, well, "x")
    redis = ClusterRedis(own_cluster.url, timeout_s=0.4)
    await asyncio.gather(redis.command("GET", at_hung), redis.command("GET", at_well))
    assert hung.process is not None
    os.kill(hung.process.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            began = time.monotonic()
            waiting = [redis.command("GET", at_hung) for _ in range(10)]
            assert await redis.command("GET", at_well) is None
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(outcome, RedisUnavailable) for outcome in outcomes)
            assert time.monotonic() - began < 5
        fresh = ClusterRedis(own_cluster.url, timeout_s=5)  # a map can be had from the others
        assert await fresh.command("GET", at_well) is None
        await fresh.close()
    finally:
        os.kill(hung.process.pid, signal.SIGCONT)
    await eventually_answers(redis, at_hung)
    await redis.close()


async def test_a_killed_node_is_found_again_and_its_successor_too(
    own_cluster: RedisCluster, redis: ClusterRedis
) -> None:
    killed, well, heir = own_cluster.nodes
    key, at_well = key_of(own_cluster, killed, "x"), key_of(own_cluster, well, "x")
    await asyncio.gather(redis.command("SET", key, "1"), redis.command("GET", at_well))
    killed.kill()
    try:
        with pytest.raises(RedisUnavailable):
            await redis.command("GET", key)
        assert await redis.command("GET", at_well) is None
        own_cluster.assign(slot_of(key), heir)
        await eventually_answers(redis, key)
    finally:
        killed.start()
        own_cluster.assign(slot_of(key), killed)
    await eventually_answers(redis, key)


async def eventually_answers(redis: ClusterRedis, key: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await redis.command("GET", key)
                return
            except RedisUnavailable:
                await asyncio.sleep(0.05)


async def test_a_wrong_password_is_a_cluster_that_cannot_be_used(redis_cluster: RedisCluster, tmp_path: Path) -> None:
    client = ClusterRedis(redis_cluster.url.replace(PASSWORD, "wrong"), timeout_s=2)
    with pytest.raises(RedisUnavailable) as caught:
        await client.command("GET", "a")
    assert "wrong" not in str(caught.value)
    await client.close()
