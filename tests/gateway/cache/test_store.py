"""What a tenant's answers take in Redis: counted exactly, bounded, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission.redis import RedisClient, create_redis
from gateway.cache.store import ENTRY_BYTES, SCRIPTS, Put, Store, entry_key, mark_key
from tests.gateway.cache.support import TENANT

OTHER = UUID(int=99)
ROOM = 10 * (ENTRY_BYTES + 101)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisClient]:
    client = create_redis(redis_url, timeout_s=5.0, scripts=SCRIPTS)
    yield client
    await client.close()


def put(
    name: str, size: int = 100, *, tenant: UUID = TENANT, ttl_s: int = 60, most: int = ROOM, mark: bytes = b""
) -> Put:
    return Put(tenant, name, mark, ttl_s, most, {"b": b"x" * size})


async def there(redis: RedisClient, tenant: UUID = TENANT) -> list[str]:
    keys = await redis.command("KEYS", entry_key(tenant, "*"))
    return sorted(key.decode().rpartition(":")[2] for key in keys)


async def test_the_oldest_go_first(redis: RedisClient) -> None:
    store = Store(redis)
    for number in range(10):
        assert await store.put(put(f"n{number}")) == ("KEPT", 0)
    assert await store.used_bytes(TENANT) == ROOM
    assert await store.put(put("n0")) == ("KEPT", 0)  # made anew, so it is the newest now
    assert await store.put(put("m")) == ("KEPT", 1)
    assert await there(redis) == sorted(["m", "n0", *(f"n{number}" for number in range(2, 10))])
    assert await store.put(put("big", 2 * ENTRY_BYTES)) == ("KEPT", 3)
    assert await there(redis) == sorted(["big", "m", "n0", *(f"n{number}" for number in range(5, 10))])


async def test_each_tenant_has_its_own_room(redis: RedisClient) -> None:
    store = Store(redis)
    await store.put(put("a", tenant=OTHER))
    for number in range(12):
        await store.put(put(f"n{number}"))
    assert await there(redis, OTHER) == ["a"]
    assert await store.used_bytes(OTHER) == ENTRY_BYTES + 101


async def test_what_is_too_large_is_not_kept_and_drives_nothing_out_but_its_elder(redis: RedisClient) -> None:
    store = Store(redis)
    await store.put(put("a"))
    await store.put(put("b"))
    assert await store.put(put("a", ROOM)) == ("TOO_LARGE", 0)
    assert await there(redis) == ["b"]
    assert await store.used_bytes(TENANT) == ENTRY_BYTES + 101


async def test_a_limit_that_shrank_is_reached(redis: RedisClient) -> None:
    store = Store(redis)
    for number in range(10):
        await store.put(put(f"n{number}"))
    assert await store.put(put("m", most=3 * (ENTRY_BYTES + 101))) == ("KEPT", 8)
    assert await there(redis) == ["m", "n8", "n9"]


async def test_bytes_are_given_back_by_what_expired_by_itself(redis: RedisClient) -> None:
    store = Store(redis)
    await store.put(put("a", ttl_s=1))
    await store.put(put("b", ttl_s=600))
    redis.time_offset_ms = 2000
    assert await store.used_bytes(TENANT) == ENTRY_BYTES + 101
    assert await there(redis) == ["b"]
    await redis.command("PEXPIRE", entry_key(TENANT, "b"), 1)  # Redis itself lets it go
    async with asyncio.timeout(5):
        while await there(redis):  # noqa: ASYNC110 - Redis would tell no event
            await asyncio.sleep(0.01)
    redis.time_offset_ms = 601_000
    assert await store.used_bytes(TENANT) == 0


async def test_nothing_is_left_behind_when_all_expired(redis: RedisClient) -> None:
    await Store(redis).put(put("a", ttl_s=1))
    for key in await redis.command("KEYS", "*"):
        assert 0 < await redis.command("PTTL", key) <= 1000, key


async def test_the_life_is_counted_from_the_making_alone(redis: RedisClient) -> None:
    store = Store(redis)
    await store.put(put("a", ttl_s=50))
    ends = await redis.command("PEXPIRETIME", entry_key(TENANT, "a"))
    await store.entry(TENANT, "a")
    await store.put(put("b", ttl_s=500))
    assert await redis.command("PEXPIRETIME", entry_key(TENANT, "a")) == ends


async def test_an_answer_that_was_asked_for_before_a_purge_is_not_kept(redis: RedisClient) -> None:
    store = Store(redis)
    before = await store.mark(TENANT) or b""
    await redis.command("SET", mark_key(TENANT), "purge")
    assert await store.put(put("a", mark=before)) == ("PURGED", 0)
    assert await there(redis) == []
    assert await store.put(put("a", mark=await store.mark(TENANT) or b"")) == ("KEPT", 0)


@pytest.mark.parametrize("lost", ["bytes", "sizes", "made", "expires"])
async def test_it_mends_when_redis_evicted_what_it_counts_by(redis: RedisClient, lost: str) -> None:
    store = Store(redis)
    for number in range(10):
        await store.put(put(f"n{number}"))
    await redis.command("DEL", f"ac:{TENANT}:{lost}")
    for number in range(25):
        await store.put(put(f"m{number}"))
    left = await there(redis)
    assert {f"m{number}" for number in range(16, 25)} <= set(left)
    counted = await redis.command("ZCARD", f"ac:{TENANT}:sizes")
    assert await store.used_bytes(TENANT) == counted * (ENTRY_BYTES + 101) <= ROOM


Step = tuple[str, int, int, int]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "remove", "wait"]), st.integers(0, 5), st.integers(0, 3000), st.integers(1, 9)
        ),
        max_size=25,
    )
)
async def test_the_sum_is_that_of_what_is_there(redis: RedisClient, steps: list[Step]) -> None:
    await redis.command("FLUSHDB")
    redis.time_offset_ms = 0
    store = Store(redis)
    kept: dict[str, tuple[int, int]] = {}
    for what, number, size, seconds in steps:
        name, now = f"n{number}", redis.time_offset_ms
        if what == "wait":
            redis.time_offset_ms += seconds * 1000
        elif what == "remove":
            assert await store.remove(TENANT, (name,)) == (name in alive(kept, now))
            kept.pop(name, None)
        else:
            bytes_ = ENTRY_BYTES + 1 + size
            kept.pop(name, None)
            kept = alive(kept, now)
            while kept and sum(held for held, _ in kept.values()) + bytes_ > 9000:
                del kept[next(iter(kept))]
            # A quarter second off the grid, so that no entry ends in the moment of a step.
            assert (await store.put(put(name, size, ttl_s=seconds, most=9000)))[0] == "KEPT"
            kept[name] = (bytes_, now + seconds * 1000)
        kept = alive(kept, redis.time_offset_ms)
        assert await store.used_bytes(TENANT) == sum(held for held, _ in kept.values())
        assert await there(redis) == sorted(kept)


def alive(kept: dict[str, tuple[int, int]], now: int) -> dict[str, tuple[int, int]]:
    return {name: (size, ends) for name, (size, ends) in kept.items() if ends > now}
