"""Identical questions at the same time: one is asked of the model, the others wait for it, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from gateway.cache.flights import LONGEST_S, Flights
from gateway.cache.found import Hit, Miss
from gateway.cache.question import Question
from gateway.policies.answer_cache import CacheRules
from tests.gateway.cache.support import EXACT, SEMANTIC, Room, SetClock, changed, chat, keep, question, room

TOGETHER = changed(EXACT, single_flight=True)


async def missed(here: Room, asked: Question) -> Miss:
    found = await here.ask(asked)
    assert isinstance(found, Miss)
    return found


async def following(here: Room, count: int, rules: CacheRules = TOGETHER) -> tuple[Miss, list[Miss]]:
    leader, *followers = [await missed(here, question(rules=rules)) for _ in range(count + 1)]
    assert not leader.following
    assert all(follower.following for follower in followers)
    return leader, followers


async def test_followers_get_the_leaders_answer(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader, followers = await following(here, 3)
        waiting = [asyncio.create_task(follower.follow()) for follower in followers]
        await asyncio.sleep(0)
        keep(leader, "One for all.", "r5")
        for found in await asyncio.gather(*waiting):
            assert isinstance(found, Hit)
            assert found.origin == "r5"
            assert b"One for all." in found.body
        assert here.tally["followed:outcome=served"] == 3
        await here.cache.drained(10)
        assert here.tally["kept:outcome=kept"] == 1
        assert await here.found(question()) == "One for all."


async def test_one_who_follows_after_the_landing_gets_it_too(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader, (follower,) = await following(here, 1)
        keep(leader)
        assert isinstance(await follower.follow(), Hit)


@pytest.mark.parametrize("end", ["drop", "truncated"])
async def test_a_leader_that_fails_sets_its_followers_free(redis_url: str, end: str) -> None:
    async with room(redis_url) as here:
        leader, followers = await following(here, 2)
        if end == "drop":
            leader.drop()
        else:
            keep(leader, finish_reason="length")
        for follower in followers:
            found = await follower.follow()
            assert found is follower
            assert not follower.following
        keep(followers[0], "Mine.")
        await here.cache.drained(10)
        assert await here.found(question()) == "Mine."
        assert here.tally["followed:outcome=freed"] == 2


async def test_followers_wait_no_longer_than_they_want(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader, (follower,) = await following(here, 1)
        found = await follower.follow(limit_s=0.02)
        assert found is follower
        keep(leader, "Late.")
        await here.cache.drained(10)
        assert await here.found(question()) == "Late."


async def test_a_follower_that_leaves_disturbs_nobody(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader, (one, two) = await following(here, 2)
        leaving = asyncio.create_task(one.follow())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        keep(leader)
        assert isinstance(await two.follow(), Hit)


async def test_only_the_same_question_is_followed(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader = await missed(here, question(rules=TOGETHER))
        others = [
            question(chat("Another?"), TOGETHER),
            question(rules=EXACT),
            question(rules=changed(TOGETHER, refresh=True)),
            question(rules=TOGETHER, end_user="e" * 64),
        ]
        for other in others:
            assert not (await missed(here, other)).following
        keep(leader)
        assert (await missed(here, others[0])).following  # of its own flight, which goes on


async def test_followers_of_the_semantic_tier_share_by_name(redis_url: str) -> None:
    async with room(redis_url) as here:
        leader, (follower,) = await following(here, 1, changed(SEMANTIC, single_flight=True))
        keep(leader)
        assert isinstance(await follower.follow(), Hit)


async def test_a_follower_takes_only_what_its_own_rules_take(redis_url: str) -> None:
    calls = [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    async with room(redis_url) as here:
        leader = await missed(here, question(rules=changed(TOGETHER, tool_calls=True)))
        follower = await missed(here, question(rules=TOGETHER))
        assert follower.following
        keep(leader, finish_reason="tool_calls", tool_calls=calls)
        assert await follower.follow() is follower


async def test_flights_work_while_redis_is_away() -> None:
    async with room("redis://127.0.0.1:1", embedder=None) as here:
        leader, (follower,) = await following(here, 1)
        assert leader.outcome == "unavailable"
        keep(leader)
        assert isinstance(await follower.follow(), Hit)
        assert here.tally["kept:outcome=unavailable"] == 1


async def test_a_flight_that_nobody_lands_is_given_up() -> None:
    clock = SetClock()
    flights = Flights(clock)
    lost, leads = flights.join("a")
    assert leads
    assert flights.join("a") == (lost, False)
    clock.ahead_s = LONGEST_S + 1
    again, leads = flights.join("a")
    assert leads
    assert again is not lost
    assert await lost.landed(5) is None
    lost.land(None)  # comes too late to matter
    assert flights.join("a") == (again, False)
    again.land(None)
    assert len(flights) == 0
