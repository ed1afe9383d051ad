from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.admission import keys
from gateway.admission.redis import RedisClient, create_redis
from gateway.admission.settlements import Settlement, Settlements
from gateway.clock import SystemClock
from gateway.ids import uuid7
from gateway.local.services import EmbeddedRedis
from gateway.redis_url import client


def settlement(redis: RedisClient, charged: int = 5) -> Settlement:
    request_id, tenant_id = uuid7(), uuid7()
    spelled = keys.of_tenant(tenant_id)
    script_keys = (
        spelled.tenant,
        spelled.live,
        spelled.request(request_id),
        spelled.leases,
        spelled.usage,
        spelled.alerts,
        spelled.epoch,
    )
    event = b'{"made":"up"}'
    arguments = (0, str(request_id), spelled.id, 0, charged, 0, event, 0, 60_000, b"", "")
    return Settlement(redis, request_id, spelled.shard, script_keys, arguments)


async def entries(redis: RedisClient, shard: str) -> int:
    return int(await redis.command("XLEN", keys.usage(shard)))


async def test_it_lands_at_once_and_once(redis_url: str) -> None:
    redis = create_redis(redis_url, timeout_s=2)
    settlements = Settlements(redis, SystemClock(), limit=10)
    one = settlement(redis)
    settlements.submit(one)
    await one.attempted
    assert settlements.waiting == 0
    assert settlements.recent_shards() == {one.shard}
    settlements.resend()
    assert settlements.waiting == 1
    async with asyncio.timeout(5):
        await settlements.drained()
    assert await entries(redis, one.shard) == 1
    await redis.close()


async def test_only_the_emptied_shard_is_sent_again(redis_url: str) -> None:
    redis = create_redis(redis_url, timeout_s=2)
    settlements = Settlements(redis, SystemClock(), limit=100)
    lost = settlement(redis)
    others = [each for each in (settlement(redis) for _ in range(10)) if each.shard != lost.shard]
    for each in (lost, *others):
        settlements.submit(each)
    await settlements.drained()
    with client(redis_url) as connected:
        connected.flushall()
    settlements.resend(lost.shard)
    assert settlements.waiting == 1
    await settlements.drained()
    assert await entries(redis, lost.shard) == 1
    assert settlements.recent_shards() == {lost.shard, *(each.shard for each in others)}
    await redis.close()


async def test_they_are_repeated_until_redis_is_back(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir / "redis")
    url = service.start()
    redis = create_redis(url, timeout_s=0.3)
    settlements = Settlements(redis, SystemClock(), limit=3)
    runner = asyncio.ensure_future(settlements.run())
    service.stop()
    several = [settlement(redis) for _ in range(3)]
    for each in several:
        assert not settlements.full
        settlements.submit(each)
    assert settlements.full
    for each in several:
        await each.attempted
    assert settlements.waiting == 3
    await asyncio.sleep(0.5)
    assert settlements.waiting == 3
    service.start()
    try:
        settlements.retry_now()
        async with asyncio.timeout(10):
            await settlements.drained()
        assert sum([await entries(redis, shard) for shard in {each.shard for each in several}]) == 3
    finally:
        runner.cancel()
        await asyncio.wait([runner])
        await redis.close()
        service.stop()
