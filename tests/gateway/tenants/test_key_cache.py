from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from gateway.db.cached import PAUSE_FACTOR, RETRY_S
from gateway.db.engine import DatabaseUnavailable
from gateway.tenants import key_cache
from gateway.tenants.key_cache import KeyCache, StoredKey
from tests.gateway.db.support import ManualClock

CACHE_S = 5.0


class Store:
    """Stands for Postgres where the test must decide when a read begins, ends or fails."""

    def __init__(self) -> None:
        self.keys: dict[str, StoredKey[str]] = {}
        self.reads: list[str] = []
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: DatabaseUnavailable | None = None

    async def read(self, public_id: str) -> StoredKey[str] | None:
        self.reads.append(public_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        found = self.keys.get(public_id)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self.fault:
                raise self.fault
            return found
        finally:
            self.running -= 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cache(clock: ManualClock, store: Store) -> KeyCache[str]:
    return KeyCache(clock, store.read, cache_s=CACHE_S)


def _key(generation: int = 1) -> StoredKey[str]:
    return StoredKey("acme", b"", None, generation)


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_key_is_read_once_within_the_cache_time(cache: KeyCache[str], store: Store, clock: ManualClock) -> None:
    store.keys["a"] = _key()
    assert await cache.get("a") == await cache.get("a") == _key()
    clock.advance(CACHE_S - 0.01)
    await cache.get("a")
    assert store.reads == ["a"]
    clock.advance(0.01)
    await cache.get("a")
    assert store.reads == ["a", "a"]


async def test_an_unknown_id_is_remembered_as_unknown_as_long(
    cache: KeyCache[str], store: Store, clock: ManualClock
) -> None:
    assert await cache.get("a") is None
    store.keys["a"] = _key()
    assert await cache.get("a") is None
    assert store.reads == ["a"]
    clock.advance(CACHE_S)
    assert await cache.get("a") == _key()


async def test_the_age_counts_from_the_begin_of_the_read(
    cache: KeyCache[str], store: Store, clock: ManualClock
) -> None:
    store.keys["a"] = _key()
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(cache.get("a"))
        await _settle()
        clock.advance(4)
        store.gate.set()
    clock.advance(1)
    await cache.get("a")
    assert len(store.reads) == 2


async def test_an_expired_key_ends_at_its_moment_though_cached(
    cache: KeyCache[str], store: Store, clock: ManualClock
) -> None:
    store.keys["a"] = StoredKey("acme", b"", clock.now() + timedelta(seconds=2), 1)
    assert await cache.get("a") is not None
    clock.advance(2)
    assert await cache.get("a") is None
    assert store.reads == ["a"]


async def test_a_crowd_shares_one_read(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key()
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        crowd = [tasks.create_task(cache.get("a")) for _ in range(50)]
        await _settle()
        store.gate.set()
    assert [task.result() for task in crowd] == [_key()] * 50
    assert store.reads == ["a"]


async def test_a_crowd_shares_one_failure(cache: KeyCache[str], store: Store) -> None:
    # Else each would wait for Postgres in turn, two seconds times the crowd.
    store.fault = DatabaseUnavailable("away")
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        crowd = [tasks.create_task(_outcome(cache, "a")) for _ in range(50)]
        await _settle()
        store.gate.set()
    assert {task.result() for task in crowd} == {"DatabaseUnavailable"}
    assert store.reads == ["a"]


async def test_while_postgres_is_away_it_is_asked_once_a_second(
    cache: KeyCache[str], store: Store, clock: ManualClock
) -> None:
    store.keys["a"] = _key()
    await cache.get("a")
    store.fault = DatabaseUnavailable("away")
    for _ in range(10):
        clock.advance(CACHE_S)
        for _ in range(5):
            assert await cache.get("a", or_old=True) == _key()
    assert len(store.reads) == 11
    with pytest.raises(DatabaseUnavailable):
        await cache.get("a")
    store.fault = None
    del store.keys["a"]
    clock.advance(RETRY_S)
    assert await cache.get("a", or_old=True) is None


async def test_while_postgres_hangs_few_wait_for_it(cache: KeyCache[str], store: Store, clock: ManualClock) -> None:
    store.keys |= {"a": _key(), "b": _key()}
    for id in store.keys:
        await cache.get(id)
    store.fault = DatabaseUnavailable("away")
    clock.advance(CACHE_S)
    await _hang(cache, store, clock)
    clock.advance(2 * PAUSE_FACTOR - 0.01)
    for id in store.keys:
        assert await cache.get(id, or_old=True) == _key()
    assert store.reads == ["a", "b", "a"]
    clock.advance(0.01)
    async with asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(_hang(cache, store, clock))
        await _settle()
        assert not hanging.done()
        for id in store.keys:
            assert await cache.get(id, or_old=True) == _key()
    assert store.reads == ["a", "b", "a", "a"]
    store.fault = None
    clock.advance(2 * PAUSE_FACTOR)
    for id in store.keys:
        await cache.get(id, or_old=True)
    assert store.reads[4:] == ["a", "b"]


async def _hang(cache: KeyCache[str], store: Store, clock: ManualClock) -> None:
    """Ask for ``a``, while an answer takes two seconds."""
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(cache.get("a", or_old=True))
        for _ in range(20):
            await _settle()
        clock.advance(2)
        store.gate.set()
    assert asking.result() == _key()


async def test_a_key_that_was_changed_is_not_taken_from_memory_while_postgres_is_away(
    cache: KeyCache[str], store: Store
) -> None:
    store.keys["a"] = _key()
    await cache.get("a")
    store.fault = DatabaseUnavailable("away")
    cache.forget("a")
    with pytest.raises(DatabaseUnavailable):
        await cache.get("a", or_old=True)


async def _outcome(cache: KeyCache[str], public_id: str) -> str:
    try:
        return str(await cache.get(public_id))
    except DatabaseUnavailable as fault:
        return type(fault).__name__


async def test_who_waits_reads_for_itself_when_the_reader_is_cancelled(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key()
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(cache.get("a"))
        await _settle()
        waiter = tasks.create_task(cache.get("a"))
        await _settle()
        reader.cancel()
        await _settle()
        store.gate.set()
    assert reader.cancelled()
    assert waiter.result() == _key()
    assert store.reads == ["a", "a"]


async def test_a_reload_does_not_trust_a_read_that_began_before_it(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key(1)
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(cache.get("a"))
        await _settle()
        store.keys["a"] = _key(2)
        late = [tasks.create_task(cache.reload("a")) for _ in range(10)]
        await _settle()
        store.gate.set()
    assert early.result() == _key(1)
    assert [task.result() for task in late] == [_key(2)] * 10
    assert len(store.reads) == 2


async def test_a_reload_takes_a_cached_key_that_is_newer(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key(2)
    await cache.get("a")
    assert await cache.reload("a", at_least=2) == _key(2)
    assert len(store.reads) == 1
    await cache.reload("a", at_least=3)
    await cache.reload("a")
    assert len(store.reads) == 3


async def test_forgetting_makes_the_next_get_read(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key(1)
    await cache.get("a")
    await cache.get("b")
    store.keys |= {"a": _key(2), "b": _key(2)}
    cache.forget_tenant(lambda principal: principal == "acme")
    cache.forget("b")
    assert await cache.get("a") == await cache.get("b") == _key(2)


async def test_what_was_changed_during_a_read_is_read_anew(cache: KeyCache[str], store: Store) -> None:
    store.keys["a"] = _key(1)
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        early = [tasks.create_task(cache.get(public_id)) for public_id in ("a", "b")]
        await _settle()
        store.keys |= {"a": _key(2), "b": _key(2)}
        cache.forget_tenant(lambda principal: principal == "acme")
        late = tasks.create_task(cache.get("a"))
        await _settle()
        store.gate.set()
    assert [task.result() for task in early] == [_key(1), None]
    assert late.result() == await cache.get("a") == await cache.get("b") == _key(2)


async def test_made_up_ids_take_few_lanes_and_leave_known_ones_free(
    cache: KeyCache[str], store: Store, clock: ManualClock
) -> None:
    store.keys["known"] = _key()
    await cache.get("known")
    clock.advance(CACHE_S)
    store.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        flood = [tasks.create_task(_outcome(cache, f"made-up-{number}")) for number in range(key_cache.MAX_QUEUED + 50)]
        await _settle()
        assert store.running == key_cache.UNKNOWN_LANES
        known = tasks.create_task(cache.get("known"))
        await _settle()
        assert store.reads[-1] == "known"
        store.gate.set()
    assert known.result() == _key()
    assert store.most_running == key_cache.UNKNOWN_LANES + 1
    assert sum(task.result() == "DatabaseUnavailable" for task in flood) == 50


async def test_memory_is_bounded(cache: KeyCache[str], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_cache, "MAX_UNKNOWN", 3)
    monkeypatch.setattr(key_cache, "MAX_KNOWN", 2)
    for number in range(10):
        await cache.get(f"made-up-{number}")
        store.keys[f"known-{number}"] = _key()
        await cache.get(f"known-{number}")
    store.reads.clear()
    for public_id in ("made-up-7", "made-up-8", "made-up-9", "known-8", "known-9"):
        await cache.get(public_id)
    assert store.reads == []
    await cache.get("made-up-6")
    await cache.get("known-7")
    assert store.reads == ["made-up-6", "known-7"]
