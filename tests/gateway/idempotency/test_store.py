"""The entries in a real Redis: any order of any actors' steps against a plain model, and the bounds one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.redis import RedisClient
from gateway.idempotency.scope import Scope
from gateway.idempotency.store import Lost, Reused, Rules, Store
from gateway.ids import uuid7
from tests.gateway.idempotency.support import connect, scope, tenant

RULES = Rules(lease_s=600.0, keep_s=36_000.0, linger_s=300.0, max_answer_bytes=40)
"""Long times, so that only the steps of a test let them pass."""


@dataclass
class Entry:
    owner: UUID
    body: str
    ends: float
    pieces: list[bytes] = field(default_factory=list)
    done: bool = False


@dataclass
class Actor:
    """A request: as an owner it counts what it wrote, as a follower it holds what it read and of whom."""

    id: UUID
    scope: Scope
    written: list[bytes] = field(default_factory=list)
    following: UUID | None = None
    found: list[bytes] = field(default_factory=list)
    ended: bool = False


class Example:
    """Several requests with one key, two bodies, and the model beside Redis."""

    def __init__(self, redis: RedisClient) -> None:
        principal = tenant()
        self.redis = redis
        self.store = Store(redis, RULES)
        self.scopes = [scope(principal, body=body) for body in (b"one", b"two")]
        self.now = 0.0
        self.entry: Entry | None = None
        self.actors: list[Actor] = []
        self.complete: dict[UUID, list[bytes]] = {}
        self.written: dict[UUID, list[bytes]] = {}

    def live(self) -> Entry | None:
        return self.entry if self.entry is not None and self.entry.ends > self.now else None

    async def step(self, operation: tuple[Any, ...]) -> None:
        name, *arguments = operation
        await getattr(self, name)(*arguments)

    async def begin(self, body: int) -> None:
        await self._begin(Actor(uuid7(), self.scopes[body]))

    async def _begin(self, actor: Actor) -> None:
        live = self.live()
        try:
            owner = await self.store.begin(actor.scope, actor.id)
        except Reused:
            assert live is not None
            assert live.body != actor.scope.body
            actor.following, actor.ended = None, True
            return
        if live is None:
            assert owner == actor.id
            self.entry = Entry(actor.id, actor.scope.body, self.now + RULES.lease_s)
            actor.following = None
        else:
            assert live.body == actor.scope.body
            assert owner == live.owner
            actor.following = owner if owner != actor.id else None
        if actor not in self.actors:
            self.actors.append(actor)

    def pick(self, index: int, *, following: bool) -> Actor | None:
        some = [each for each in self.actors if (each.following is not None) == following and not each.ended]
        return some[index % len(some)] if some else None

    async def append(self, index: int, pieces: list[bytes], complete: bool, lost_reply: bool) -> None:
        actor = self.pick(index, following=False)
        if actor is None:
            return
        before = len(actor.written)
        verdict = await self.store.share(actor.scope, actor.id, before, pieces, complete=complete)
        if lost_reply:
            assert await self.store.share(actor.scope, actor.id, before, pieces, complete=complete) in (verdict, "LOST")
        actor.written += pieces
        self.written[actor.id] = actor.written
        entry = self.entry
        if entry is None or entry.owner != actor.id:
            assert verdict == "LOST"
            actor.ended = True
        elif sum(map(len, actor.written)) > RULES.max_answer_bytes:
            assert verdict == "TOO_LARGE"
            actor.ended, self.entry = True, None
        elif complete:
            assert verdict == "KEPT"
            actor.ended, entry.done = True, True
            entry.pieces, entry.ends = list(actor.written), self.now + RULES.keep_s
            self.complete[actor.id] = list(actor.written)
        else:
            assert verdict == "SHARED"
            entry.pieces, entry.ends = list(actor.written), self.now + RULES.lease_s

    async def drop(self, index: int) -> None:
        actor = self.pick(index, following=False)
        if actor is None:
            return
        mine = self.entry is not None and self.entry.owner == actor.id
        assert await self.store.drop(actor.scope, actor.id) == mine
        actor.ended = True
        if mine:
            self.entry = None

    async def crash(self, index: int) -> None:
        actor = self.pick(index, following=False)
        if actor is not None:
            actor.ended = True

    async def read(self, index: int, most: int) -> None:
        actor = self.pick(index, following=True)
        if actor is None or actor.following is None:
            return
        live = self.live()
        try:
            pieces = await self.store.read(actor.scope, actor.following, len(actor.found), most)
        except Lost:
            assert live is None or live.owner != actor.following
            if actor.found:  # part of an answer was handed on: it must not be mixed with another
                actor.ended = True
            else:
                await self._begin(actor)
            return
        assert live is not None
        assert live.owner == actor.following
        assert (pieces.known, pieces.done) == (len(live.pieces), live.done)
        actor.found += pieces.found
        owners = self.written.get(actor.following, [])
        assert actor.found == owners[: len(actor.found)]
        if pieces.done and len(actor.found) == pieces.known:
            assert actor.found == self.complete[actor.following]
            actor.ended = True

    async def advance(self, seconds: float) -> None:
        self.redis.time_offset_ms += round(seconds * 1000)
        self.now += seconds


indices = st.integers(0, 3)
operations = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("begin"), st.just(0)),
    st.tuples(
        st.just("append"),
        indices,
        st.lists(st.binary(min_size=1, max_size=6), max_size=3),
        st.booleans(),
        st.booleans(),
    ),
    st.tuples(st.just("read"), indices, st.integers(1, 3)),
    st.tuples(st.just("read"), indices, st.integers(1, 3)),
    st.tuples(st.just("drop"), indices),
    st.tuples(st.just("crash"), indices),
    st.tuples(st.just("advance"), st.sampled_from([350.0, 700.0, 700.0, 37_000.0])),
)


@settings(max_examples=200)
@given(st.lists(operations, min_size=10, max_size=50))
def test_one_owner_at_a_time_and_no_mixed_answer(redis_server: str, steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        redis = connect(redis_server)
        try:
            example = Example(redis)
            for operation in steps:
                await example.step(operation)
        finally:
            await redis.close()

    asyncio.run(run())


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisClient]:
    connection = connect(redis_url)
    yield connection
    await connection.close()


async def test_of_many_at_once_one_takes_over_a_dead_owners_entry(redis: RedisClient) -> None:
    store, here = Store(redis, RULES), scope()
    await store.begin(here, uuid7())
    redis.time_offset_ms += 700_000
    contenders = [uuid7() for _ in range(20)]
    owners = await asyncio.gather(*(store.begin(here, contender) for contender in contenders))
    assert len(set(owners)) == 1
    assert owners[0] in contenders


async def test_a_kept_answer_ends_however_often_it_is_read(redis: RedisClient) -> None:
    store, here, owner = Store(redis, RULES), scope(), uuid7()
    await store.begin(here, owner)
    assert await store.share(here, owner, 0, [b"x"], complete=True) == "KEPT"
    for _ in range(3):
        redis.time_offset_ms += 11_000_000
        assert (await store.read(here, owner, 0, 9)).found == [b"x"]
        assert await store.begin(here, uuid7()) == owner
    redis.time_offset_ms += 3_100_000
    with pytest.raises(Lost):
        await store.read(here, owner, 0, 9)
    newcomer = uuid7()
    assert await store.begin(here, newcomer) == newcomer


async def test_redis_itself_forgets_in_time(redis: RedisClient) -> None:
    rules = Rules(lease_s=0.02, keep_s=0.2, linger_s=0.2)
    store, here = Store(redis, rules), scope()
    silent, kept = uuid7(), uuid7()
    await store.begin(here, silent)
    await store.share(here, silent, 0, [b"x"])
    other = scope(key="other")
    await store.begin(other, kept)
    await store.share(other, kept, 0, [b"x"], complete=True)
    async with asyncio.timeout(10):
        while await redis.command("DBSIZE"):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.05)


async def test_over_the_number_of_entries_answers_are_shared_but_not_kept(redis: RedisClient) -> None:
    principal = tenant()
    store = Store(redis, Rules(lease_s=600.0, keep_s=36_000.0, linger_s=300.0, max_entries=2))
    here = [scope(principal, key=str(number)) for number in range(3)]
    owners = [uuid7() for _ in here]
    for each, owner in zip(here[:2], owners, strict=False):
        await store.begin(each, owner)
        assert await store.share(each, owner, 0, [b"x"], complete=True) == "KEPT"
    await store.begin(here[2], owners[2])
    assert await store.share(here[2], owners[2], 0, [b"x"]) == "SHARED"
    assert await store.share(here[2], owners[2], 1, [b"y"], complete=True) == "NOT_KEPT"
    assert await store.share(here[2], owners[2], 1, [b"y"], complete=True) == "NOT_KEPT"
    assert (await store.read(here[2], owners[2], 0, 9)).found == [b"x", b"y"]  # by those who follow it now
    other = scope(key="0")
    await store.begin(other, uuid7())  # another tenant has entries of its own
    redis.time_offset_ms += 310_000
    with pytest.raises(Lost):
        await store.read(here[2], owners[2], 0, 9)
    redis.time_offset_ms += 36_000_000  # the first two are gone, and make room
    await store.begin(here[2], owners[2])
    assert await store.share(here[2], owners[2], 0, [b"x"], complete=True) == "KEPT"


async def test_the_bytes_of_a_tenant_are_bounded_and_counted_back(redis: RedisClient) -> None:
    principal = tenant()
    store = Store(redis, Rules(max_answer_bytes=10_000, max_kept_bytes=8_000, max_total_bytes=12_000))
    here = [scope(principal, key=str(number)) for number in range(3)]
    owners = [uuid7() for _ in here]
    for each, owner in zip(here, owners, strict=True):
        await store.begin(each, owner)
    assert await store.share(here[0], owners[0], 0, [b"x" * 6_000], complete=True) == "KEPT"
    assert await store.share(here[1], owners[1], 0, [b"x" * 2_000]) == "SHARED"
    assert await store.share(here[1], owners[1], 1, [], complete=True) == "NOT_KEPT"
    assert await store.share(here[2], owners[2], 0, [b"x" * 3_000]) == "FULL"
    with pytest.raises(Lost):
        await store.read(here[2], owners[2], 0, 9)
    total = await redis.command("HGET", here[0].keys[3], "total")
    assert int(total) == 6_000 + 2_000 + 2 * 512


async def test_an_owner_whose_pieces_are_gone_writes_no_torn_answer(redis: RedisClient) -> None:
    store, here, owner = Store(redis, RULES), scope(), uuid7()
    await store.begin(here, owner)
    assert await store.share(here, owner, 0, [b"x"]) == "SHARED"
    await redis.command("DEL", here.keys[1])
    assert await store.share(here, owner, 1, [b"y"], complete=True) == "LOST"
    newcomer = uuid7()
    assert await store.begin(here, newcomer) == newcomer
