"""Owners and followers in rooms of their own, as on several replicas, over a real Redis; the answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import pytest

from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Ticket
from gateway.answerable import Answerable
from gateway.idempotency.answers import Owned, Replay, Request
from gateway.idempotency.scope import Scope
from gateway.idempotency.service import MAX_WAITING, Idempotency
from gateway.idempotency.store import Rules, Store
from gateway.ids import uuid7
from gateway.local.services import EmbeddedRedis
from gateway.observability.metrics import Metrics
from gateway.observability.observer import Observer
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import DRAFT, Ledger, admission
from tests.gateway.idempotency.support import connect, eventually, room, scope, tenant
from worker.protocol.errors import ApiError


class Scripted:
    """An answer whose events the test puts in; ``None`` ends it."""

    def __init__(self, *, streamed: bool = True, timeout_s: float = 30.0) -> None:
        self.streamed, self.timeout_s = streamed, timeout_s
        self.complete = self.client_left = self.entered = self.ended = False
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, *events: bytes | None) -> Scripted:
        for event in events:
            self.queue.put_nowait(event)
        return self

    def left(self) -> None:
        self.client_left = True

    def headers(self) -> list[tuple[str, str]]:
        return [("x-own", "1")]

    async def events(self) -> list[bytes]:
        event = await self.queue.get()
        if event is None:
            self.complete = True
            return []
        return [event]

    async def whole(self) -> bytes:
        found = [event for event in [await self.queue.get()] if event is not None]
        self.complete = True
        return found[-1]

    async def __aenter__(self) -> Scripted:
        self.entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = True


class Caller:
    """A request with an idempotency key: how often it ran, and what it was admitted as."""

    def __init__(
        self, gate: Admission, principal: Principal, *, streamed: bool = True, timeout_s: float = 30.0
    ) -> None:
        self.id = uuid7()
        self.own = Scripted(streamed=streamed, timeout_s=timeout_s)
        self.ran = 0
        self.ticket: Ticket | None = None
        self.refusal: ApiError | None = None
        self.request = Request(
            self.id, streamed, timeout_s, 30.0, self._execute, self._admit_replay, Observer(Metrics(), None)
        )
        self._gate, self._principal = gate, principal

    async def _execute(self) -> Answerable:
        if self.refusal is not None:
            raise self.refusal
        self.ran += 1
        return self.own

    async def _admit_replay(self) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        self.ticket = await self._gate.admit(self.id, self._principal, draft=DRAFT, bound=Bound(0, 0))
        return self.ticket

    @property
    def row(self) -> tuple[str, str | None, int] | None:
        """Status, error code and charge of the replay."""
        event = self.ticket.event if self.ticket is not None else None
        return None if event is None else (event.status, event.error_code, event.charged_nano_usd)


async def collect(answer: Answerable) -> list[bytes]:
    found: list[bytes] = []
    async with answer:
        while not answer.complete:
            found += await answer.events()
    return found


@dataclass
class Stage:
    """Two replicas, and one tenant's key."""

    one: Idempotency
    two: Idempotency
    gate: Admission
    principal: Principal
    scope: Scope

    def caller(self, *, streamed: bool = True, timeout_s: float = 30.0) -> Caller:
        return Caller(self.gate, self.principal, streamed=streamed, timeout_s=timeout_s)

    async def own(self, caller: Caller) -> Answerable:
        """The answer of a first request, on the first replica."""
        answer = await self.one.answer(self.scope, caller.request)
        assert isinstance(answer, Owned)
        return answer

    async def follow(self, caller: Caller) -> Answerable:
        """The answer of another, on the second."""
        answer = await self.two.answer(self.scope, caller.request)
        assert isinstance(answer, Replay)
        return answer


@asynccontextmanager
async def stage(redis_url: str, rules: Rules | None = None, *, timeout_s: float = 2.0) -> AsyncIterator[Stage]:
    acme = tenant()
    async with (
        admission(redis_url, Ledger(redis_url)) as gate,
        room(redis_url, rules, timeout_s=timeout_s) as one,
        room(redis_url, rules, timeout_s=timeout_s) as two,
    ):
        yield Stage(one, two, gate, acme, scope(acme))


@pytest.fixture
async def on(redis_url: str) -> AsyncIterator[Stage]:
    async with stage(redis_url) as set_up:
        yield set_up


async def test_a_follower_sees_events_while_the_owner_goes_on(on: Stage) -> None:
    first, second = on.caller(), on.caller()
    owner, follower = await on.own(first), await on.follow(second)
    async with owner, follower:
        assert follower.headers() == []
        for event in (b"a", b"b"):
            first.own.say(event)
            assert await owner.events() == [event]
            assert await follower.events() == [event]
        assert ("idempotent-replayed", "true") in follower.headers()
        assert ("x-penstock-original-request-id", str(first.id)) in follower.headers()
        first.own.say(None)
        assert await owner.events() == []
        assert await follower.events() == []
        assert follower.complete
    assert second.ran == 0
    assert second.row == ("replayed", None, 0)
    late = on.caller()
    assert await collect(await on.follow(late)) == [b"a", b"b"]
    assert late.row == ("replayed", None, 0)


async def test_a_cluster_does_as_well(redis_cluster_url: str) -> None:
    async with stage(redis_cluster_url) as on:
        events = [b"x" * 70_000, b"y"]
        first, second, third = on.caller(), on.caller(), on.caller()
        owner, follower = await on.own(first), await on.follow(second)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(collect(follower))
            first.own.say(*events, None)
            assert await collect(owner) == events
        assert following.result() == events
        assert await collect(await on.follow(third)) == events
        assert second.row == third.row == ("replayed", None, 0)


async def test_whole_answers_wait_and_are_the_same(on: Stage) -> None:
    callers = [on.caller(streamed=False) for _ in range(4)]
    owner = await on.own(callers[0])
    followers = [await on.follow(caller) for caller in callers[1:]]

    async def whole(answer: Answerable) -> tuple[bytes, list[tuple[str, str]]]:
        async with answer:
            return await answer.whole(), answer.headers()

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(whole(follower)) for follower in followers]
        callers[0].own.say(b"body")
        async with owner:
            assert await owner.whole() == b"body"
    for each in waiting:
        body, headers = each.result()
        assert body == b"body"
        assert ("x-penstock-cost-usd", "0.000000000") in headers
    assert [caller.ran for caller in callers] == [1, 0, 0, 0]
    assert {caller.row for caller in callers[1:]} == {("replayed", None, 0)}


async def test_a_long_answer_comes_in_pieces_and_whole(on: Stage) -> None:
    events = [bytes([number % 256]) * 50_000 for number in range(40)]
    first = on.caller()
    first.own.say(*events, None)
    assert await collect(await on.own(first)) == events
    assert await collect(await on.follow(on.caller())) == events


async def test_another_body_is_refused_while_the_first_runs_and_after(on: Stage) -> None:
    first = on.caller()
    owner = await on.own(first)
    other = scope(on.principal, body=b"other")
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await on.two.answer(other, on.caller().request)
        assert (caught.value.status, caught.value.body.code) == (409, "idempotency_key_reused")
        if not owner.complete:
            first.own.say(b"x", None)
            assert await collect(owner) == [b"x"]


@pytest.mark.parametrize("end", ["hung up", "refused"])
async def test_if_the_owner_gives_up_one_of_those_that_wait_runs(on: Stage, end: str) -> None:
    first = on.caller()
    owner = await on.own(first)
    waiting = [on.caller() for _ in range(5)]
    answers = [await on.follow(caller) for caller in waiting]
    for caller in waiting:
        caller.own.say(caller.id.bytes, None)
    if end == "refused":  # one that takes over may be refused, too; then it is the next one's turn
        waiting[0].refusal = ApiError(429, "no")
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(collected(answer)) for answer in answers]
        async with owner:
            owner.left()
    assert first.own.ended
    results = [each.result() for each in running]
    assert sum(caller.ran for caller in waiting) == 1
    winner = next(caller for caller in waiting if caller.ran)
    assert all(result in ([winner.id.bytes], None) for result in results)
    assert sum(result is None for result in results) == (end == "refused")
    assert winner.row is None
    assert sum(caller.row == ("replayed", None, 0) for caller in waiting) == 4 - (end == "refused")


async def collected(answer: Answerable) -> list[bytes] | None:
    try:
        return await collect(answer)
    except ApiError:
        return None


async def test_a_dead_owners_entry_goes_to_one_of_those_that_wait(redis_url: str) -> None:
    rules = Rules(lease_s=600.0)
    async with stage(redis_url, rules) as on:
        dead = connect(redis_url)
        await Store(dead, rules).begin(on.scope, uuid7())
        await dead.close()
        callers = [on.caller(streamed=False) for _ in range(3)]
        answers = [await on.follow(caller) for caller in callers]
        for caller in callers:
            caller.own.say(caller.id.bytes)

        async def whole(answer: Answerable) -> bytes:
            async with answer:
                return await answer.whole()

        on.two._redis.time_offset_ms += 700_000
        bodies = await asyncio.gather(*(whole(answer) for answer in answers))
        assert sum(caller.ran for caller in callers) == 1
        assert len(set(bodies)) == 1


async def test_an_owner_that_is_silent_renews_its_lease(redis_url: str) -> None:
    async with stage(redis_url, Rules(lease_s=1.0)) as on:
        direct = connect(redis_url)
        async with await on.own(on.caller()):
            ends = await direct.command("HGET", on.scope.keys[0], "ends")
            async with asyncio.timeout(30):
                while await direct.command("HGET", on.scope.keys[0], "ends") <= ends:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        await direct.close()


async def test_what_was_handed_on_is_never_mixed_with_another_answer(on: Stage) -> None:
    first, second = on.caller(), on.caller()
    owner, follower = await on.own(first), await on.follow(second)
    first.own.say(b"x")
    async with follower:
        async with owner:
            await owner.events()
            assert await follower.events() == [b"x"]
            owner.left()
        third = on.caller()
        third.own.say(b"y", None)
        with pytest.raises(ApiError) as caught:
            await follower.events()
        assert caught.value.body.code == "idempotent_original_lost"
        assert await collect(await on.two.answer(on.scope, third.request)) == [b"y"]
    assert (second.ran, third.ran) == (0, 1)
    assert second.row == ("failed", "idempotent_original_lost", 0)


async def test_a_followers_leaving_does_not_touch_the_owner(on: Stage) -> None:
    first, early, late = on.caller(), on.caller(), on.caller()
    owner = await on.own(first)
    async with owner:
        async with await on.follow(early) as follower:
            follower.left()
        first.own.say(b"x")
        await owner.events()
        async with await on.follow(late) as follower:
            assert await follower.events() == [b"x"]
            follower.left()
        first.own.say(None)
        await owner.events()
    assert early.row is None  # nothing was replayed yet: it was never admitted
    assert late.row == ("aborted", None, 0)
    assert await collect(await on.follow(on.caller())) == [b"x"]


async def test_one_without_patience_leaves_no_entry_behind(on: Stage) -> None:
    hasty = replace(on.caller().request, patience_s=0.0)
    with pytest.raises(RedisUnavailable):
        await on.one.answer(on.scope, hasty)
    await on.own(on.caller())


async def test_errors_are_not_kept(on: Stage) -> None:
    first = on.caller()
    first.refusal = ApiError(429, "no")
    with pytest.raises(ApiError):
        await on.one.answer(on.scope, first.request)
    second = on.caller()
    second.own.say(b"x", None)
    await asyncio.sleep(0)
    answer = await on.two.answer(on.scope, second.request)
    assert await collect(answer) == [b"x"]
    assert second.ran == 1


async def test_too_long_an_answer_is_not_kept_and_harms_nobody(redis_url: str) -> None:
    async with stage(redis_url, Rules(max_answer_bytes=1000)) as on:
        first = on.caller()
        first.own.say(b"x" * 600, b"y" * 600, None)
        assert len(await collect(await on.own(first))) == 2
        second = on.caller()
        second.own.say(b"z", None)
        assert await collect(await on.two.answer(on.scope, second.request)) == [b"z"]
        assert second.ran == 1


async def test_a_follower_waits_no_longer_than_the_route_allows(on: Stage) -> None:
    first, second = on.caller(), on.caller(timeout_s=0.3)
    async with await on.own(first), await on.follow(second) as follower:
        with pytest.raises(ApiError) as caught:
            await follower.events()
    assert caught.value.status == 504


async def test_a_replay_may_be_refused(on: Stage) -> None:
    first, second = on.caller(), on.caller()
    first.own.say(b"x", None)
    await collect(await on.own(first))
    second.refusal = ApiError(429, "over the limit")
    with pytest.raises(ApiError, match="over the limit"):
        await collect(await on.follow(second))


async def test_so_many_may_wait(on: Stage) -> None:
    first = on.caller()
    async with AsyncExitStack() as waiting:
        await waiting.enter_async_context(await on.own(first))
        for _ in range(MAX_WAITING):
            await waiting.enter_async_context(await on.follow(on.caller()))
        with pytest.raises(ApiError) as caught:
            await on.two.answer(on.scope, on.caller().request)
        assert caught.value.status == 429
    assert not on.two._waiting


async def test_a_kept_answer_that_was_changed_is_not_passed_on(redis_url: str, on: Stage) -> None:
    first = on.caller()
    first.own.say(b"x", None)
    await collect(await on.own(first))
    await eventually(lambda: not on.one._shares)
    direct = connect(redis_url)
    sealed = await direct.command("LINDEX", on.scope.keys[1], 0)
    await direct.command("LSET", on.scope.keys[1], 0, sealed[:-1] + bytes([sealed[-1] ^ 1]))
    await direct.close()
    with pytest.raises(ApiError, match="cannot be read"):
        await collect(await on.follow(on.caller()))


async def test_redis_dying_harms_followers_only(services_dir: Path) -> None:
    redis = EmbeddedRedis(services_dir, durable=False)
    url = redis.start()
    try:
        async with stage(url, timeout_s=0.5) as on:
            first, second = on.caller(), on.caller()
            async with await on.own(first) as owner, await on.follow(second) as follower:
                first.own.say(b"a")
                assert await owner.events() == [b"a"]
                assert await follower.events() == [b"a"]
                redis.stop()
                first.own.say(b"b", None)
                assert await collect(owner) == [b"b"]
                with pytest.raises(ApiError) as caught:
                    await follower.events()
                assert (caught.value.status, caught.value.body.code) == (503, "service_unavailable")
            with pytest.raises(RedisUnavailable):
                await on.two.answer(on.scope, on.caller().request)
    finally:
        redis.stop()
