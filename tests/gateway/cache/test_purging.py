"""Forgetting: by all that an answer is known by, also what is being made, and what nobody can read any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from gateway.admission.redis import RedisUnavailable
from gateway.cache.found import Miss
from gateway.cache.question import Question
from gateway.cache.service import AnswerCache
from gateway.clock import SystemClock
from gateway.datakeys.service import DataKeys
from gateway.db.engine import create_engine
from gateway.redis_url import asyncio_client
from tests.gateway.cache.support import SEMANTIC, TENANT, Room, changed, chat, keep, question, room
from tests.gateway.datakeys.support import MASTER_KEYS, tenant

OTHER = UUID(int=99)
ANN, BOB = "a" * 64, "b" * 64
TEXTS = ("How can I reset my old password", "Where is the nearest lake", "Who wrote this long book")
Forget = Callable[[AnswerCache], Awaitable[int]]


async def three(here: Room) -> list[Any]:
    """Of one tenant, which differ in all that is purged by; and one of another tenant, like the first."""
    asked = [
        question(chat(TEXTS[0]), SEMANTIC, route="m", version="1", tags=("red", "big"), end_user=ANN),
        question(chat(TEXTS[1]), SEMANTIC, route="m", version="2", tags=("red",), end_user=BOB),
        question(chat(TEXTS[2]), SEMANTIC, route="n", version="1"),
        question(chat(TEXTS[0]), SEMANTIC, route="m", version="1", tags=("red",), end_user=ANN, tenant_id=OTHER),
    ]
    for number, each in enumerate(asked):
        await here.answer(each, request_id=f"r{number}")
    return asked


@pytest.mark.parametrize(
    ("forget", "gone"),
    [
        (lambda cache: cache.purge(TENANT), {0, 1, 2}),
        (lambda cache: cache.purge(TENANT, route="m"), {0, 1}),
        (lambda cache: cache.purge(TENANT, version="1"), {0, 2}),
        (lambda cache: cache.purge(TENANT, route="m", version="1"), {0}),
        (lambda cache: cache.purge(TENANT, tag="red"), {0, 1}),
        (lambda cache: cache.purge(TENANT, tag="big"), {0}),
        (lambda cache: cache.purge(TENANT, tag="re"), set()),
        (lambda cache: cache.purge(TENANT, route=""), set()),
        (lambda cache: cache.erase(TENANT), {0, 1, 2}),
        (lambda cache: cache.erase(TENANT, end_user=ANN), {0}),
        (lambda cache: cache.erase(TENANT, request_id="r2"), {2}),
        (lambda cache: cache.erase(TENANT, request_id="r3"), set()),
    ],
)
async def test_what_was_named_is_gone_and_nothing_else(redis_url: str, forget: Forget, gone: set[int]) -> None:
    async with room(redis_url) as here:
        asked = await three(here)
        before = await here.cache.store.used_bytes(TENANT)
        assert await forget(here.cache) == len(gone)
        for number, each in enumerate(asked):
            assert (await here.found(each) is None) is (number in gone), number
        assert await here.cache.store.used_bytes(TENANT) < before or not gone
        assert await forget(here.cache) == 0


async def test_a_tenant_of_many_is_forgotten_whole(redis_url: str) -> None:
    async with room(redis_url) as here:
        for number in range(1200):
            miss = await here.ask(question(chat(f"How many are {number}")))
            assert isinstance(miss, Miss)
            keep(miss)
            await here.cache.drained(10)
        await here.answer(question(tenant_id=OTHER))
        assert await here.cache.purge(TENANT) == 1200
        assert await here.cache.store.used_bytes(TENANT) == 0
        assert await here.found(question(tenant_id=OTHER)) == "Yes."
        client = asyncio_client(redis_url, timeout_s=5)
        assert await client.keys(f"ac:{TENANT}:*") == [f"ac:{TENANT}:purged".encode()]
        await client.aclose()


@pytest.mark.parametrize("rules", [SEMANTIC, changed(SEMANTIC, refresh=True)], ids=["miss", "refresh"])
async def test_an_answer_under_way_is_not_kept_behind_a_purge(redis_url: str, rules: Any) -> None:
    async with room(redis_url) as here:
        miss = await here.ask(question(rules=rules))
        assert isinstance(miss, Miss)
        assert await here.cache.purge(TENANT, tag="another") == 0
        keep(miss)
        await here.cache.drained(10)
        assert await here.found(question(rules=SEMANTIC)) is None
        assert here.tally["kept:outcome=purged"] == 1
        await here.answer(question(rules=SEMANTIC))
        assert await here.found(question(rules=SEMANTIC)) == "Yes."


async def test_erasing_a_tenant_erases_its_counts(redis_url: str) -> None:
    rules = changed(SEMANTIC, shadow=True)
    async with room(redis_url) as here:
        await here.answer(question(chat(TEXTS[0]), rules))
        await here.answer(question(chat(TEXTS[0] + "s"), rules))
        assert (await here.cache.agreement(TENANT)).agreed == 1
        await here.cache.purge(TENANT)
        assert (await here.cache.agreement(TENANT)).agreed == 1
        await here.cache.erase(TENANT)
        assert (await here.cache.agreement(TENANT)).agreed == 0


async def test_a_purge_that_cannot_be_done_says_so(redis_url: str) -> None:
    async with room("redis://127.0.0.1:1", embedder=None) as here:
        with pytest.raises(RedisUnavailable, match="try again"):
            await here.cache.purge(TENANT)


async def test_what_an_erased_key_sealed_is_a_miss_and_is_removed(redis_url: str, database_url: str) -> None:
    engine = create_engine(database_url, pool_size=2)
    owner = await tenant(engine)

    def asked(text: str, end_user: str | None = None) -> Question:
        shared = changed(SEMANTIC, across_end_users=True)
        return question(chat(text), shared, tenant_id=owner, end_user=end_user)

    async with DataKeys(engine, MASTER_KEYS, SystemClock()) as keys, room(redis_url, keys=keys) as here:
        for text, end_user in zip(TEXTS, (ANN, BOB, None), strict=True):
            await here.answer(asked(text, end_user))
        assert [await here.found(asked(text)) for text in TEXTS] == ["Yes."] * 3
        assert [await here.found(asked(f"{text} now")) for text in TEXTS] == ["Yes."] * 3
        await keys.erase(owner, ANN)
        assert await here.found(asked(f"{TEXTS[0]} now")) is None
        assert await here.found(asked(TEXTS[0])) is None
        assert here.tally["faults:part=unreadable"] >= 1
        assert [await here.found(asked(text)) for text in TEXTS[1:]] == ["Yes."] * 2
        await keys.erase(owner)
        assert [await here.found(asked(f"{text} now")) for text in TEXTS] == [None] * 3
        assert [await here.found(asked(text)) for text in TEXTS] == [None] * 3
    client = asyncio_client(redis_url, timeout_s=5)
    assert await client.keys("ac:*:a:*") == []
    await client.aclose()
    await engine.dispose()
