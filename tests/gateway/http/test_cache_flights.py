"""Single flight, through the doors: identical requests at the same time, and all the ways in which one of them ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.admission.redis import create_redis
from gateway.admission.snapshot import SNAPSHOT, snapshot
from gateway.policies.answer_cache import CachePolicy
from gateway.tenants.specs import LimitSpec
from gateway.verify.requests import REQUESTS
from gateway.verify.service import verify
from tests.gateway.conftest import chunk_event, whole_event
from tests.gateway.http.cache_support import CHAT, asking, change, client_of, patient
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = [
    LimitSpec(metric="concurrent", amount=50),
    LimitSpec(metric="budget", window="day", amount=10**12),
    LimitSpec(metric="tokens", window="day", amount=10**9),
]
POLICY = CachePolicy(mode="exact", single_flight=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    with patient():
        folder = tmp_path_factory.mktemp("gateway")
        async with shared_gateway(databases, redis_server, folder, limits=LIMITS, keepalive_s=0.2) as made:
            await change(await made.view(), POLICY)
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


async def agrees(gateway: Any) -> None:
    """Nothing runs any more, and counters, rows and sums are one."""
    url = gateway.settings.redis_url
    redis = create_redis(url, timeout_s=10, scripts=(SNAPSHOT, REQUESTS), name="verify")
    try:
        found = await verify(redis, url, gateway.engine, pauses_s=(0.05,) * 20)
        tenant = await gateway.directory.tenant("acme")
        counters = await snapshot(redis, tenant.id)
    finally:
        await redis.close()
    assert (found.differences, found.busy) == ([], [])
    assert (counters.live, counters.requests) == (0, ())


class Held:
    """A backend whose answers wait until they are let go."""

    def __init__(self, *, fails: bool = False, finish: str = "stop") -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self._fails = fails
        self._finish = finish

    async def __call__(self, c: Any) -> None:
        self.asked += 1
        first = self.asked == 1
        if not first:
            self._fails, self._finish = False, "stop"
        if c.body.get("stream"):
            await c.begin()
            await c.token("Par", 1)
            if first:
                await self.go.wait()
            if first and self._fails:
                c.reset()
                return
            await c.token("is", 2)
            await c.event(chunk_event("", finish=self._finish))
            await c.meter(9, 3)
            await c.done()
            return
        if first:
            await self.go.wait()
        if first and self._fails:
            await c.status(400, b'{"error": {"message": "no"}}')
            return
        await c.whole(whole_event("Paris").replace(b'"stop"', b'"%b"' % self._finish.encode()))

    async def until_asked(self, times: int = 1) -> None:
        async with asyncio.timeout(5):
            while self.asked < times:  # noqa: ASYNC110 - a backend tells no event
                await asyncio.sleep(0.01)


async def leads(client: httpx.AsyncClient, ask: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await client.post(CHAT, json=ask)


async def left_alone(client: httpx.AsyncClient, ask: dict[str, Any], after_s: float = 0.6) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await client.post(CHAT, json=ask)


def text_of(answer: httpx.Response) -> str:
    return "".join(part for part in ("Par", "is") if part in answer.text) if answer.status_code == 200 else ""


@pytest.mark.parametrize("leader", [False, True])
@pytest.mark.parametrize("follower", [False, True])
async def test_streamed_and_whole_follow_each_other(gateway: Any, shared: Any, leader: bool, follower: bool) -> None:
    held = Held()
    await shared.script(held)
    ask = asking(f"Follow {leader} {follower}")
    async with client_of(gateway) as client, asyncio.TaskGroup() as group:
        first = group.create_task(client.post(CHAT, json=ask | {"stream": leader}))
        await held.until_asked()
        others = [group.create_task(client.post(CHAT, json=ask | {"stream": follower})) for _ in range(3)]
        await asyncio.sleep(0.5)  # beyond a sign of life
        held.go.set()
    for answer in (first, *others):
        assert answer.result().status_code == 200
        assert answer.result().text.endswith("[DONE]\n\n") == answer.result().headers["content-type"].startswith("text")
    assert held.asked == 1
    rows = await gateway.rows(4)
    assert sorted((row.status, row.cache) for row in rows) == sorted(
        [("ok", None)] + [("cache_hit", "exact")] * 3, key=str
    )
    paid = next(row for row in rows if row.status == "ok")
    assert {row.saved_nano_usd for row in rows if row.status == "cache_hit"} == {paid.charged_nano_usd}
    assert {row.charged_nano_usd for row in rows if row.status == "cache_hit"} == {0}
    for answer in others:
        assert (
            "x-ratelimit-limit-tokens" in answer.result().headers
            or "x-ratelimit-limit-requests" in answer.result().headers
        )
    await agrees(gateway)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["fails", "truncated", "leaves"])
async def test_a_leader_of_which_nothing_comes(gateway: Any, shared: Any, stream: bool, kind: str) -> None:
    held = Held(fails=kind == "fails", finish="length" if kind == "truncated" else "stop")
    await shared.script(held)
    ask = asking(f"Leader {kind} {stream}", stream=stream)
    async with client_of(gateway) as client, client_of(gateway) as other, asyncio.TaskGroup() as group:
        first = group.create_task(left_alone(other, ask) if kind == "leaves" else leads(other, ask))
        await held.until_asked()
        asked = [group.create_task(client.post(CHAT, json=ask)) for _ in range(3)]
        await asyncio.sleep(0.1)
        if kind != "leaves":
            held.go.set()
        await first
        held.go.set()
    for answer in asked:
        assert (answer.result().status_code, text_of(answer.result())) == (200, "Paris")
    rows = await gateway.rows(4)
    ended = {"fails": "failed", "truncated": "ok", "leaves": "aborted"}[kind]
    assert sorted(row.status for row in rows) == sorted([ended] + ["ok"] * 3)
    await agrees(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_followers_that_leave(gateway: Any, shared: Any, stream: bool) -> None:
    held = Held()
    await shared.script(held)
    ask = asking(f"Followers leave {stream}")
    async with client_of(gateway) as client, asyncio.TaskGroup() as group:
        first = group.create_task(client.post(CHAT, json=ask))
        await held.until_asked()

        gone = [left_alone(client, ask | {"stream": stream}) for _ in range(3)]
        await asyncio.gather(*gone)
        assert sorted(row.status for row in await gateway.rows(3)) == ["aborted"] * 3
        held.go.set()
        assert (await first).status_code == 200
    rows = await gateway.rows(4)
    assert sorted(row.status for row in rows) == ["aborted"] * 3 + ["ok"]
    assert {(row.charged_nano_usd, row.attempts) for row in rows if row.status == "aborted"} == {(0, 0)}
    assert held.asked == 1
    await agrees(gateway)


async def test_idempotency_keys_and_single_flight(gateway: Any, shared: Any) -> None:
    held = Held()
    await shared.script(held)
    ask = asking("Both at once")
    async with client_of(gateway) as client, asyncio.TaskGroup() as group:
        first = group.create_task(client.post(CHAT, json=ask, headers={"idempotency-key": "a"}))
        await held.until_asked()
        keys = ["a", "b", "b", "c"]
        others = [group.create_task(client.post(CHAT, json=ask, headers={"idempotency-key": key})) for key in keys]
        await asyncio.sleep(0.3)
        held.go.set()
    assert {answer.result().json()["choices"][0]["message"]["content"] for answer in (first, *others)} == {"Paris"}
    assert held.asked == 1
    rows = await gateway.rows(5)
    assert sorted(row.status for row in rows) == ["cache_hit"] * 2 + ["ok"] + ["replayed"] * 2
    async with client_of(gateway) as client:
        again = await client.post(CHAT, json=ask, headers={"idempotency-key": "b"})
        assert again.headers["idempotent-replayed"] == "true"
        assert "x-penstock-cache" not in again.headers
    await gateway.rows(6)
    await agrees(gateway)
