"""The index of the semantic tier: made where it can be, again when it is gone, and said to be missing where not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.cache.found import Hit, Miss
from gateway.local.services import EmbeddedRedis
from gateway.redis_url import asyncio_client
from tests.gateway.cache.support import SEMANTIC, Room, WordEmbedder, changed, chat, question, room

ASKED, ALIKE = "How can I reset my old password", "How could I reset my old password"


async def found_by_meaning(here: Room, text: str = ALIKE, within_s: float = 10.0) -> bool:
    """Redis goes through what lies there already beside what it is asked."""
    async with asyncio.timeout(within_s):
        while True:
            found = await here.ask(question(chat(text), SEMANTIC))
            if isinstance(found, Hit):
                return found.tier == "semantic"
            await asyncio.sleep(0.01)


async def test_it_is_made_again_after_a_flush(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), SEMANTIC))
        client = asyncio_client(redis_url, timeout_s=5)
        await client.flushdb()
        miss = await here.answer(question(chat(ASKED), SEMANTIC))
        assert miss.outcome == "miss"
        assert await found_by_meaning(here)
        await client.aclose()


async def test_what_was_kept_without_it_is_found_once_it_is_there(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), SEMANTIC))
        client = asyncio_client(redis_url, timeout_s=5)
        (name,) = await client.execute_command("FT._LIST")
        await client.execute_command("FT.DROPINDEX", name)
        assert isinstance(await here.ask(question(chat(ALIKE), SEMANTIC)), Miss)
        assert await found_by_meaning(here)
        await client.aclose()


async def test_two_replicas_may_make_it_at_once(redis_url: str) -> None:
    async with room(redis_url) as one, room(redis_url, keys=one.keys) as two:
        assert one.cache.semantic_available
        assert two.cache.semantic_available


async def test_each_embedder_has_its_own(redis_url: str) -> None:
    async with room(redis_url), room(redis_url, embedder=WordEmbedder("Org/Model-v2", 40)):
        client = asyncio_client(redis_url, timeout_s=5)
        names = await client.execute_command("FT._LIST")
        assert sorted(names) == [b"ac:index_org_model_v2_40", b"ac:index_words_48"]
        await client.aclose()


async def test_a_partition_of_many_keeps_its_nearest(redis_url: str) -> None:
    async with room(redis_url) as here:
        alone = changed(SEMANTIC, threshold=1.0)
        for number in range(150):
            await here.answer(
                question(chat(f"Tell me of {'abcdefghijklmnopqrstuvwxyz'[number % 26] * (number + 1)}"), alone)
            )
        await here.answer(question(chat(ASKED), SEMANTIC), "This.")
        assert await here.found(question(chat(ALIKE), changed(SEMANTIC, threshold=0.0))) == "This."


class RedisWithoutSearch(EmbeddedRedis):
    def _settings(self) -> dict[str, str]:
        return {name: value for name, value in super()._settings().items() if name != "loadmodule"}


@pytest.fixture(scope="module")
def plain_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    service = RedisWithoutSearch(Path(tmp_path_factory.mktemp("plain")), durable=False)
    yield service.start()
    service.stop()


@pytest.mark.parametrize("database", ["of_a_server_without_search", "other_than_the_first"])
async def test_where_there_is_no_search_the_exact_tier_works_alone(
    plain_redis: str, redis_url: str, database: str
) -> None:
    url = plain_redis if database == "of_a_server_without_search" else redis_url.removesuffix("/0") + "/1"
    with capture_logs() as logs:
        async with room(url) as here:
            assert here.cache.semantic_available is False
            assert here.cache.semantic_fault
            await here.cache.purge(question().tenant_id)
            await here.answer(question(chat(ASKED), SEMANTIC))
            assert await here.found(question(chat(ASKED), SEMANTIC)) == "Yes."
            for _ in range(5):
                assert isinstance(await here.ask(question(chat(ALIKE), SEMANTIC)), Miss)
            here.clock.ahead_s += 60
            assert isinstance(await here.ask(question(chat(ALIKE), SEMANTIC)), Miss)
            assert here.embedder.asked == []
    (line,) = [line for line in logs if line["event"] == "semantic_cache_off"]
    assert line["log_level"] == "warning"
    assert "Redis 8" in line["remedy"]
    assert not [line for line in logs if line["event"] == "answer_cache_fault"]


async def test_without_an_embedder_there_is_no_semantic_tier(redis_url: str) -> None:
    async with room(redis_url, embedder=None) as here:
        assert here.cache.semantic_available is False
        assert here.cache.semantic_fault == "no embedder is configured"
        await here.answer(question(chat(ASKED), SEMANTIC))
        assert await here.found(question(chat(ASKED), SEMANTIC)) == "Yes."
        assert await here.found(question(chat(ALIKE), SEMANTIC)) is None
