"""The cache on a real Redis: what is found, by whom, and for how long."""

from __future__ import annotations

import logging
from random import Random
from typing import Any
from uuid import UUID

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.cache.agreement import Agreement
from gateway.cache.found import Hit, Miss
from gateway.policies.answer_cache import CacheRules
from gateway.redis_url import asyncio_client
from tests.gateway.cache.support import (
    EXACT,
    SEMANTIC,
    TENANT,
    USAGE,
    Tally,
    WordEmbedder,
    changed,
    chat,
    keep,
    question,
    room,
    told,
)

OTHER = UUID(int=99)
ASKED, ALIKE, NEAR_MISS = (
    "How can I reset my old password in 2 steps",
    "How could I reset my old password in 2 steps",
    "How can I reset my old password in 3 steps",
)


async def test_an_answer_is_found_again_as_it_was_kept(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(), "Click on it.", "r7")
        found = await here.ask(question())
        assert isinstance(found, Hit)
        assert found.tier == "exact"
        assert found.usage == USAGE
        assert (found.origin, found.similarity, found.made_at) == ("r7", None, here.clock.now())
        assert msgspec.json.decode(found.body)["choices"][0]["message"]["content"] == "Click on it."
        assert here.tally["lookups:outcome=hit:tier=exact"] == 1
        assert here.tally["kept:outcome=kept"] == 1


async def test_streams_and_wholes_share(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(stream=True, stream_options={"include_usage": True}), streamed=True))
        assert await here.found(question()) == "Yes."


async def test_another_process_finds_it(redis_url: str) -> None:
    async with room(redis_url) as one:
        await one.answer(question(chat(ASKED), SEMANTIC))
        async with room(redis_url, keys=one.keys) as two:
            assert await two.found(question(chat(ALIKE), SEMANTIC)) == "Yes."


async def test_an_entry_ends_at_its_time_however_often_it_is_hit(redis_url: str) -> None:
    rules = changed(SEMANTIC, ttl_s=10)
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), rules))
        client = asyncio_client(redis_url, timeout_s=5)
        (key,) = await client.keys("ac:*:a:*")
        ends = await client.pexpiretime(key)
        now = await client.time()
        assert 8_000 < ends - (now[0] * 1000 + now[1] // 1000) <= 10_000
        for _ in range(10):
            assert await here.found(question(chat(ASKED), rules)) == "Yes."
            assert await here.found(question(chat(ALIKE), rules)) == "Yes."
            here.clock.ahead_s += 1
        assert await here.found(question(chat(ASKED), rules)) is None
        assert await here.found(question(chat(ALIKE), rules)) is None
        assert await client.pexpiretime(key) == ends
        await client.aclose()


async def test_a_request_that_wants_it_fresh_gets_no_old_answer(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question())
        here.clock.ahead_s = 30
        assert await here.found(question(rules=changed(EXACT, ttl_s=30))) is None
        assert await here.found(question(rules=changed(EXACT, ttl_s=31))) == "Yes."


async def test_refresh_is_answered_by_the_model_and_keeps(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(), "Old.")
        miss = await here.answer(question(rules=changed(EXACT, refresh=True)), "New.")
        assert miss.outcome == "refresh"
        assert await here.found(question()) == "New."


async def test_off_is_a_bypass_that_keeps_nothing(redis_url: str) -> None:
    async with room(redis_url) as here:
        miss = await here.answer(question(rules=CacheRules()))
        assert (miss.outcome, miss.reason) == ("bypass", "off")
        assert await here.found(question()) is None


@pytest.mark.parametrize("rules", [EXACT, SEMANTIC], ids=["exact", "semantic"])
async def test_two_tenants_never_get_each_others_answers(redis_url: str, rules: CacheRules) -> None:
    shared = changed(rules, across_projects=True, across_end_users=True, threshold=0.0)
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), shared), "First.")
        assert await here.found(question(chat(ASKED), shared, tenant_id=OTHER)) is None
        await here.answer(question(chat(ASKED), shared, tenant_id=OTHER), "Second.")
        assert await here.found(question(chat(ASKED), shared)) == "First."
        assert await here.found(question(chat(ASKED), shared, tenant_id=OTHER)) == "Second."


async def test_an_answer_moved_to_another_tenants_key_is_not_given(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(), "First.")
        await here.answer(question(tenant_id=OTHER), "Second.")
        client = asyncio_client(redis_url, timeout_s=5)
        (theirs,) = await client.keys(f"ac:{OTHER}:a:*")
        (ours,) = await client.keys(f"ac:{TENANT}:a:*")
        await client.hset(ours, mapping=await client.hgetall(theirs))
        assert await here.found(question()) is None
        assert here.tally["faults:part=unreadable"] == 1
        await client.aclose()


async def test_alike_questions_share_an_answer_and_near_misses_do_not(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), SEMANTIC), request_id="r9")
        found = await here.ask(question(chat(ALIKE), SEMANTIC))
        assert isinstance(found, Hit)
        assert (found.tier, found.origin) == ("semantic", "r9")
        assert found.similarity is not None
        assert 0.6 <= found.similarity <= 1
        with capture_logs() as logs:
            assert await here.found(question(chat(NEAR_MISS), SEMANTIC, request_id="r10")) is None
        (line,) = [line for line in logs if line["event"] == "semantic_matches_rejected"]
        assert (line["guards"], line["request_id"]) == (["numbers"], "r10")
        assert "password" not in repr(line)
        assert here.tally["rejected:guard=numbers"] == 1


async def test_the_next_nearest_is_found_behind_a_near_miss(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(NEAR_MISS), SEMANTIC), "Three.")
        await here.answer(question(chat("How can we reset my old password in 2 simple steps"), SEMANTIC), "Two.")
        assert await here.found(question(chat(ASKED), SEMANTIC)) == "Two."


async def test_the_threshold_holds_and_zero_is_one(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), SEMANTIC))
        near = await here.ask(question(chat(ALIKE), SEMANTIC))
        assert isinstance(near, Hit)
        assert near.similarity is not None
        above = changed(SEMANTIC, threshold=near.similarity + 1e-4)
        assert await here.found(question(chat(ALIKE), above)) is None
        assert await here.found(question(chat(ALIKE), changed(above, threshold=near.similarity - 1e-4))) == "Yes."
        for words in ("What is 2", "Sing about 2", "Which lake holds 2 fish"):
            at_zero = await here.ask(question(chat(words), changed(SEMANTIC, threshold=0.0)))
            if isinstance(at_zero, Hit):
                assert 0 <= (at_zero.similarity or 0) < 0.6
                break
        else:
            pytest.fail("no text of another meaning was taken at a threshold of 0")


async def test_what_is_kept_by_the_exact_tier_alone_is_not_found_by_meaning(redis_url: str) -> None:
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), EXACT))
        assert await here.found(question(chat(ALIKE), SEMANTIC)) is None
        assert await here.found(question(chat(ASKED), SEMANTIC)) == "Yes."


async def test_vectors_of_another_embedder_are_not_compared(redis_url: str) -> None:
    rules = changed(SEMANTIC, threshold=0.0)
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), rules))
        for other in (WordEmbedder("other"), WordEmbedder("words", 40)):
            async with room(redis_url, keys=here.keys, embedder=other) as there:
                assert await there.found(question(chat(ALIKE), rules)) is None
                assert await there.found(question(chat(ASKED), rules)) == "Yes."


async def test_shadow_answers_nothing_by_meaning_and_says_what_it_would_have(redis_url: str) -> None:
    rules = changed(SEMANTIC, shadow=True)
    async with room(redis_url) as here:
        await here.answer(question(chat(ASKED), rules), "Press it.", "r1")
        miss = await here.answer(question(chat(ALIKE), rules), "press  IT.", "r2")
        assert miss.outcome == "shadow_hit"
        assert miss.candidate is not None
        assert miss.candidate.origin == "r1"
        assert here.tally["lookups:outcome=shadow_hit:tier=semantic"] == 1
        assert await here.found(question(chat(ALIKE), rules)) == "press  IT."  # the exact tier serves
        assert await here.cache.agreement(TENANT) == Agreement(agreed=1, disagreed=0)


async def test_a_share_of_hits_is_asked_of_the_model_and_compared(redis_url: str) -> None:
    rules = changed(SEMANTIC, verify_share=0.5)
    async with room(redis_url, random=Random(3)) as here:
        await here.answer(question(chat(ASKED), rules), "Press the red button.")
        verified = 0
        for word in (
            "ape",
            "bee",
            "cat",
            "dog",
            "eel",
            "fox",
            "gnu",
            "hen",
            "ibis",
            "jay",
            "kid",
            "newt",
            "owl",
            "pug",
        ):
            found = await here.ask(question(chat(f"How could I reset my old {word} password in 2 steps"), rules))
            if isinstance(found, Hit):
                assert found.tier == "semantic"
            else:
                assert found.outcome == "verify"
                found.keep(*told(("Red button: press the!", "Lakes are full of fish.")[verified % 2]), word)
                verified += 1
                assert await here.cache.drained(10)
                await here.cache.purge(TENANT)  # for all to be compared with the same answer
                await here.answer(question(chat(ASKED), rules), "Press the red button.")
        assert 3 <= verified <= 11
        assert await here.cache.agreement(TENANT) == Agreement(agreed=-(-verified // 2), disagreed=verified // 2)
        assert here.tally["agreement:agreed=yes"] == -(-verified // 2)
        assert await here.cache.agreement(OTHER) == Agreement(agreed=0, disagreed=0)


async def test_none_is_verified_at_a_share_of_zero(redis_url: str) -> None:
    class Zero(Random):
        def random(self) -> float:
            return 0.0

    async with room(redis_url, random=Zero()) as here:
        await here.answer(question(chat(ASKED), SEMANTIC))
        assert isinstance(await here.ask(question(chat(ALIKE), SEMANTIC)), Hit)
        sampled = await here.ask(question(chat(ALIKE), changed(SEMANTIC, verify_share=0.01)))
        assert isinstance(sampled, Miss)
        assert sampled.outcome == "verify"
        sampled.drop()


async def test_keep_counts_once(redis_url: str) -> None:
    async with room(redis_url) as here:
        miss = await here.answer(question())
        keep(miss, "Again.")
        await here.cache.drained(10)
        assert await here.found(question()) == "Yes."
        assert here.tally["kept:outcome=kept"] == 1


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("truncated", {"finish_reason": "length"}),
        ("unfinished", {"finish_reason": None}),
        ("refused", {"finish_reason": "content_filter"}),
        ("refused", {"refusal": "I will not."}),
        ("too_long", {"text": "x" * 300_000}),
        (
            "tool_calls",
            {"finish_reason": "tool_calls", "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f"}}]},
        ),
    ],
)
async def test_bad_answers_are_not_kept(redis_url: str, reason: str, message: dict[str, Any]) -> None:
    async with room(redis_url) as here:
        await here.answer(question(), **message)
        assert await here.found(question()) is None
        assert here.tally[f"kept:outcome={reason}"] == 1


async def test_answers_of_the_present_are_kept_and_given_to_those_who_ask_for_that(redis_url: str) -> None:
    shared = changed(SEMANTIC, across_projects=True)
    rules = changed(shared, time_words=True)
    ask = "What is new with the old lake today"
    async with room(redis_url) as here:
        await here.answer(question(chat(ask), shared))
        assert here.tally["kept:outcome=time_words"] == 1
        await here.answer(question(chat(ask), rules))
        assert await here.found(question(chat(ask), rules)) == "Yes."
        assert await here.found(question(chat(f"{ask}?"), rules)) == "Yes."
        assert await here.found(question(chat(ask), shared, project_id=OTHER)) is None
        assert await here.found(question(chat(f"{ask}?"), shared, project_id=OTHER)) is None


async def test_tool_calls_are_kept_and_given_to_those_who_ask_for_that(redis_url: str) -> None:
    calls = [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    rules = changed(EXACT, tool_calls=True)
    async with room(redis_url) as here:
        await here.answer(question(rules=rules), finish_reason="tool_calls", tool_calls=calls)
        assert isinstance(await here.ask(question(rules=rules)), Hit)
        assert isinstance(await here.ask(question()), Miss)


async def test_what_is_in_redis_tells_nothing(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with room(redis_url) as here:
        secret_words = chat("How can I reset the Winterbourne password")
        asked = question(secret_words, SEMANTIC, tags=("team-Winterbourne",), route="Winterbourne", end_user="a" * 64)
        await here.answer(asked, "Ask Winterbourne. " * 200)
        client = asyncio_client(redis_url, timeout_s=5)
        keys = await client.keys("*")
        held = [await client.dump(key) for key in keys]
        assert any(b":a:" in key for key in keys)
        assert not [part for part in (*keys, *held) if part is not None and b"winterbourne" in part.lower()]
        (entry,) = await client.keys("ac:*:a:*")
        vector = [value for field, value in (await client.hgetall(entry)).items() if field.startswith(b"v_")]
        plain = bytes(await here.embedder.embed(secret_words["messages"][1]["content"]))
        assert len(vector) == 1
        assert vector[0] != plain
        assert isinstance(await here.ask(asked), Hit)
        await client.aclose()
    assert "winterbourne" not in caplog.text.lower()


async def test_counts_of_one_cache_are_its_own(redis_url: str) -> None:
    tally = Tally()
    async with room(redis_url, counter=tally) as here:
        await here.answer(question())
        assert tally["lookups:outcome=miss:tier=exact"] == 1
