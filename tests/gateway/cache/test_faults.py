"""Whatever the cache leans on fails or hangs: a miss within the limit, and soon not even a wait."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from gateway.cache.found import Hit, Miss
from gateway.cache.pause import FAULTS, PAUSE_S
from gateway.datakeys.data_key import DataKey
from gateway.db.engine import DatabaseUnavailable
from tests.gateway.cache.support import (
    EXACT,
    SEMANTIC,
    TENANT,
    MemoryKeys,
    NumberGuards,
    Room,
    WordEmbedder,
    changed,
    chat,
    keep,
    question,
    room,
)


@asynccontextmanager
async def hanging_server() -> AsyncIterator[str]:
    """Takes connections, and never says a word."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()


async def outcome(here: Room, asked: Any = None) -> str:
    found = await here.ask(question() if asked is None else asked)
    return "hit" if isinstance(found, Hit) else found.outcome


async def test_a_redis_that_is_away_is_a_miss() -> None:
    async with room("redis://127.0.0.1:1", embedder=None) as here:
        miss = await here.answer(question())
        assert miss.outcome == "unavailable"
        assert here.tally["faults:part=redis"] == 1


async def test_a_redis_that_hangs_costs_a_few_requests_the_limit_and_the_others_nothing() -> None:
    async with hanging_server() as url, room(url, embedder=None, limit_s=0.05) as here:
        for _ in range(FAULTS):
            assert await outcome(here) == "unavailable"
        assert here.tally["faults:part=redis"] == FAULTS
        for _ in range(100):
            assert await outcome(here) == "unavailable"
        assert here.tally["faults:part=redis"] == FAULTS  # nobody asked
        here.clock.ahead_s += PAUSE_S
        found = await asyncio.gather(*(outcome(here) for _ in range(20)))
        assert set(found) == {"unavailable"}
        assert here.tally["faults:part=redis"] == FAULTS + 1  # one tried
        assert here.tally["lookups:outcome=unavailable:tier=exact"] == FAULTS + 120


async def test_it_comes_back_by_itself(redis_url: str) -> None:
    async with room(redis_url, limit_s=10.0) as here:
        await here.answer(question())
        for _ in range(FAULTS):
            here.cache._room.pauses["redis"].failed()
        assert await outcome(here) == "unavailable"
        here.clock.ahead_s += PAUSE_S
        assert await outcome(here) == "hit"
        assert await outcome(here) == "hit"


class Slow(WordEmbedder):
    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def embed(self, text: str) -> array[float] | bytes:
        self.asked.append(text)
        await self.gate.wait()
        return await super().embed(text)


async def test_an_embedder_that_is_slow_costs_the_semantic_tier_alone(redis_url: str) -> None:
    slow = Slow()
    asked = question(chat("Where is the old lake"), SEMANTIC)
    async with room(redis_url, embedder=slow, limit_s=0.05) as here:
        for _ in range(FAULTS):
            miss = await here.ask(asked)
            assert isinstance(miss, Miss)
            assert miss.outcome == "unavailable"
        assert await outcome(here, asked) == "unavailable"
        assert len(slow.asked) == FAULTS
        slow.gate.set()
        keep(miss)  # and yet the answer is kept, and found by its meaning later
        assert await here.cache.drained(10)
    async with room(redis_url, keys=here.keys) as later:
        assert await later.found(question(chat("Where was the old lake"), SEMANTIC)) == "Yes."
        assert await later.found(asked) == "Yes."


async def test_an_embedder_that_fails_keeps_for_the_exact_tier(redis_url: str) -> None:
    class Broken(WordEmbedder):
        async def embed(self, text: str) -> array[float] | bytes:
            raise ValueError(f"cannot embed {text}")

    asked = question(chat("Where is the Winterbourne"), SEMANTIC)
    with capture_logs() as logs:
        async with room(redis_url, embedder=Broken()) as here:
            await here.answer(asked)
            assert await here.found(asked) == "Yes."
    assert {line["error"].split(" at ")[0] for line in logs if "error" in line} == {"ValueError"}
    assert "Winterbourne" not in repr(logs)


@pytest.mark.parametrize("vector", [array("f", [0.0] * 48), array("f", [float("nan")] * 48), array("f", [1.0] * 3)])
async def test_an_odd_vector_matches_nothing(redis_url: str, vector: array[float]) -> None:
    rules = changed(SEMANTIC, threshold=0.0)

    class Odd(WordEmbedder):
        async def embed(self, text: str) -> array[float] | bytes:
            return vector

    async with room(redis_url) as here:
        await here.answer(question(chat("Where is the lake"), rules))
        async with room(redis_url, keys=here.keys, embedder=Odd()) as there:
            await there.answer(question(chat("What is a lake"), rules))
            assert await there.found(question(chat("Why is a lake"), rules)) is None
            assert await there.found(question(chat("What is a lake"), rules)) == "Yes."


async def test_keys_that_cannot_be_read_are_no_erased_keys(redis_url: str) -> None:
    class Away(MemoryKeys):
        away = False

        async def by_id(self, tenant_id: UUID, key_id: UUID) -> DataKey | None:
            if self.away:
                raise DatabaseUnavailable("Postgres is away")
            return await super().by_id(tenant_id, key_id)

    keys = Away()
    async with room(redis_url, keys=keys) as here:
        await here.answer(question())
        keys.away = True
        for _ in range(FAULTS + 2):
            assert await outcome(here) == "unavailable"
        assert here.tally["faults:part=keys"] == FAULTS
        keys.away = False
        here.clock.ahead_s += PAUSE_S
        assert await here.found(question()) == "Yes."


async def test_a_guard_that_fails_is_a_miss(redis_url: str) -> None:
    class Broken(NumberGuards):
        def check(self, asked: str, kept: str) -> Any:
            raise KeyError(asked)

    async with room(redis_url, guards=Broken()) as here:
        await here.answer(question(chat("Where is the old lake"), SEMANTIC))
        assert await outcome(here, question(chat("Where was the old lake"), SEMANTIC)) == "unavailable"
        assert here.tally["faults:part=guards"] == 1


async def test_a_look_up_that_is_cancelled_is(redis_url: str) -> None:
    async with hanging_server() as url, room(url, embedder=None) as here:
        asking = asyncio.create_task(here.ask(question()))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()


async def test_too_much_to_be_kept_at_once_is_dropped(redis_url: str) -> None:
    rules = changed(EXACT, max_answer_bytes=8 * 1024 * 1024)
    async with room(redis_url) as here:
        misses = [await here.ask(question(chat(f"Number {number}?"), rules)) for number in range(9)]
        for miss in misses:  # without letting the keeper run
            assert isinstance(miss, Miss)
            keep(miss, "x" * (8 * 1024 * 1024 - 500))
        assert await here.cache.drained(60)
        assert here.tally["kept:outcome=queue_full"] == 1
        assert here.tally["kept:outcome=kept"] == 8
        assert await here.cache.store.used_bytes(TENANT)
        long = question(chat("x" * 40 * 1024 * 1024), rules)  # a question's bytes wait, too
        twice = [await here.ask(long), await here.ask(long)]
        for miss in twice:
            assert isinstance(miss, Miss)
            keep(miss, finish_reason="stop")
        assert await here.cache.drained(60)
        assert here.tally["kept:outcome=queue_full"] == 2
