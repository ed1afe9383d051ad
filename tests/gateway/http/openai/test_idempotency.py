"""Requests with an idempotency key through the whole gateway: one reaches the backend, all are answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local.services import EmbeddedRedis
from gateway.redis_url import client as redis_client
from gateway.settings import Settings
from gateway.tenants.principal import RedisLossPolicy
from gateway.tenants.specs import TenantChange
from tests.gateway.http.openai.test_chat import ASK, PATH, client_of, error_of, events_of, eventually, paris
from tests.gateway.tenants.support import ACTOR, budget, concurrent, requests_per_minute
from tests.ports import free_port

KEY = {"idempotency-key": "8e03978e-40d5-43e8-bc93-6894a57f9324"}
STREAM = ASK | {"stream": True}


class Held:
    """A backend's script that answers once it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, c: Any) -> None:
        await self.go.wait()
        await paris(c)


def seen_of(server: Any) -> int:
    return len(server.seen)


def data_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "streamed"])
async def test_duplicates_at_once_and_later_run_once(gateway: Any, upstream: Any, body: dict[str, Any]) -> None:
    script = Held()
    server = await upstream(script)
    await gateway.register(server)
    async with client_of(gateway) as client:
        waiting = [asyncio.create_task(client.post(PATH, json=body, headers=KEY)) for _ in range(4)]
        await eventually(lambda: seen_of(server) == 1)
        await asyncio.sleep(0.1)  # let the others ask too
        script.go.set()
        answers = [await each for each in waiting]
        answers.append(await client.post(PATH, json=body, headers=KEY))
        plain = await client.post(PATH, json=body)
    assert seen_of(server) == 2  # the plain one is the second
    replays = [answer for answer in answers if answer.headers.get("idempotent-replayed") == "true"]
    (first,) = [answer for answer in answers if answer not in replays]
    for replay in replays:
        assert data_of(replay) == data_of(first)
        assert replay.headers["content-type"] == first.headers["content-type"]
        assert replay.headers["x-penstock-original-request-id"] == first.headers["x-request-id"]
        assert replay.headers["x-request-id"] != first.headers["x-request-id"]
    assert "x-penstock-original-request-id" not in first.headers
    assert "idempotent-replayed" not in plain.headers
    rows = {str(row.request_id): row for row in await gateway.rows(6)}
    assert set(rows) == {answer.headers["x-request-id"] for answer in [*answers, plain]}
    assert Counter(row.status for row in rows.values()) == {"ok": 2, "replayed": 4}
    for replay in replays:
        row = rows[replay.headers["x-request-id"]]
        assert (row.charged_nano_usd, row.cost_nano_usd, row.prompt_tokens, row.completion_tokens) == (0, 0, 0, 0)
        assert (row.error_code, row.backend, row.attempts) == (None, None, 0)
    if body is ASK:
        assert {replay.headers["x-penstock-cost-usd"] for replay in replays} == {"0.000000000"}


async def test_a_stream_is_followed_live(gateway: Any, upstream: Any) -> None:
    go = asyncio.Event()

    async def script(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await go.wait()
        await c.token("is", 2)
        await c.done()

    server = await upstream(script)
    await gateway.register(server)
    async with client_of(gateway) as client, client.stream("POST", PATH, json=STREAM, headers=KEY) as first:
        assert "idempotent-replayed" not in first.headers
        async with client.stream("POST", PATH, json=STREAM, headers=KEY) as second:
            assert second.headers["idempotent-replayed"] == "true"
            pieces = second.aiter_text()
            found = await anext(pieces)
            assert "Par" in found
            assert "[DONE]" not in found
            go.set()
            found += "".join([piece async for piece in pieces])
        assert events_of(found) == events_of((await first.aread()).decode())
    assert seen_of(server) == 1


async def test_another_body_is_refused_while_the_first_runs_and_after(gateway: Any, upstream: Any) -> None:
    script = Held()
    server = await upstream(script)
    await gateway.register(server)
    async with client_of(gateway) as client:
        first = asyncio.create_task(client.post(PATH, json=ASK, headers=KEY))
        await eventually(lambda: seen_of(server) == 1)
        refused = [await client.post(PATH, json=STREAM, headers=KEY)]
        script.go.set()
        assert (await first).status_code == 200
        refused.append(await client.post(PATH, json=ASK | {"seed": 1}, headers=KEY))
    for answer in refused:
        assert answer.status_code == 409
        error = error_of(answer)
        assert (error["code"], error["type"]) == ("idempotency_key_reused", "invalid_request_error")
        assert answer.headers["x-should-retry"] == "false"  # without it, OpenAI's SDKs repeat a 409
    assert seen_of(server) == 1
    await gateway.rows(1)


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é"])
async def test_a_key_that_is_none_is_refused_by_name(gateway: Any, key: str) -> None:
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK, headers={"idempotency-key": key.encode()})
        unknown = await client.post(
            PATH, json=ASK, headers={"authorization": "Bearer no", "idempotency-key": key.encode()}
        )
    assert answer.status_code == 400
    assert "idempotency-key" in error_of(answer)["message"]
    assert unknown.status_code == 401


async def test_keys_of_others_are_others(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    second, _ = await gateway.directory.create_key(ACTOR, "acme", "second")
    await gateway.directory.create_tenant(ACTOR, "other")
    foreign, _ = await gateway.directory.create_key(ACTOR, "other", "test")
    for key in (gateway.key, second, foreign):
        async with client_of(gateway, key) as client:
            answer = await client.post(PATH, json=ASK, headers=KEY)
            assert "idempotent-replayed" not in answer.headers
            again = await client.post(PATH, json=ASK, headers=KEY)
            assert again.headers["x-penstock-original-request-id"] == answer.headers["x-request-id"]
    assert seen_of(server) == 3
    await gateway.rows(6)


async def test_errors_are_not_kept(gateway: Any, upstream: Any) -> None:
    async def refuse(c: Any) -> None:
        await c.status(400, b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}')

    async def cut(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        c.reset()

    server = await upstream(refuse, cut, paris)
    await gateway.register(server)
    async with client_of(gateway) as client:
        assert (await client.post(PATH, json=STREAM, headers=KEY)).status_code == 400
        assert "[DONE]" not in (await client.post(PATH, json=STREAM, headers=KEY)).text
        answer = await client.post(PATH, json=STREAM, headers=KEY)
    assert data_of(answer)[-1] == "[DONE]"
    assert "idempotent-replayed" not in answer.headers
    assert [row.status for row in await gateway.rows(3)] == ["failed", "failed", "ok"]


async def test_a_hang_up_of_the_first_ends_it_and_the_second_runs(gateway: Any, upstream: Any) -> None:
    closed = asyncio.Event()

    async def wait_for_hang_up(c: Any) -> None:
        await c.wait_closed_by_peer()
        closed.set()

    server = await upstream(wait_for_hang_up, paris)
    await gateway.register(server)
    async with client_of(gateway) as client:
        first = asyncio.create_task(client.post(PATH, json=ASK, headers=KEY))
        await eventually(lambda: seen_of(server) == 1)
        second = asyncio.create_task(client.post(PATH, json=ASK, headers=KEY))
        await asyncio.sleep(0.1)  # let it ask
        first.cancel()
        await closed.wait()
        answer = await second
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers
    assert sorted(row.status for row in await gateway.rows(2)) == ["aborted", "ok"]


async def test_a_replay_counts_as_a_request_and_costs_nothing(start_gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    # Enough money for one request at worst (0.000417 USD), and not for a second.
    async with start_gateway(limits=[requests_per_minute(3), budget(420_000, "total")]) as gateway:
        await gateway.register(server)
        async with client_of(gateway) as client:
            body = ASK | {"max_tokens": 20}
            answers = [await client.post(PATH, json=body, headers=KEY)]
            other = await client.post(PATH, json=body)
            answers += [await client.post(PATH, json=body, headers=KEY) for _ in range(2)]
            refused = await client.post(PATH, json=body, headers=KEY)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
        assert (other.status_code, error_of(other)["code"]) == (429, "insufficient_quota")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        rows = await gateway.rows(3)
    assert [row.status for row in rows] == ["ok", "replayed", "replayed"]
    assert sum(row.charged_nano_usd for row in rows) == 15_000


async def test_a_refused_request_gives_its_key_back(start_gateway: Any, upstream: Any) -> None:
    script = Held()
    server = await upstream(script)
    async with start_gateway(limits=[concurrent(1)]) as gateway:
        await gateway.register(server)
        async with client_of(gateway) as client:
            running = asyncio.create_task(client.post(PATH, json=ASK))
            await eventually(lambda: seen_of(server) == 1)
            assert (await client.post(PATH, json=ASK, headers=KEY)).status_code == 429
            script.go.set()
            await running
            answer = await client.post(PATH, json=ASK, headers=KEY)
        assert answer.status_code == 200
        assert "idempotent-replayed" not in answer.headers


async def test_a_kept_answer_needs_no_backend_but_a_key_that_is_still_good(start_gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    async with start_gateway(principal_cache_s=0.0) as gateway:
        await gateway.register(server)
        async with client_of(gateway) as client:
            first = await client.post(PATH, json=ASK, headers=KEY)
            await server.stop()
            replay = await client.post(PATH, json=ASK, headers=KEY)
            assert replay.content == first.content
            (key,) = [key for key in await gateway.directory.list_keys("acme") if key.name == "test"]
            await gateway.directory.revoke_key(ACTOR, key.public_id)
            assert (await client.post(PATH, json=ASK, headers=KEY)).status_code == 401


async def test_what_is_kept_in_redis_tells_neither_key_nor_words(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with client_of(gateway) as client:
        for _ in range(2):
            answer = await client.post(PATH, json=ASK, headers={"idempotency-key": "order-4711"})
    assert answer.headers["idempotent-replayed"] == "true"
    with redis_client(gateway.settings.redis_url) as direct:
        names = list(direct.scan_iter("*:idempotency:*"))
        stored = b"".join(direct.dump(name) or b"" for name in names)
    assert len(names) == 4
    assert not any(b"4711" in name for name in names)
    assert not any(word in stored for word in (b"4711", b"Paris", b"France", b"content"))


@pytest.mark.parametrize("policy", ["fail_closed", "fail_open"])
async def test_without_redis_the_tenants_policy_decides(
    start_gateway: Any, upstream: Any, services_dir: Path, policy: RedisLossPolicy
) -> None:
    server = await upstream(paris)
    store = EmbeddedRedis(services_dir, durable=False)
    async with start_gateway(redis_url=store.start(), spool_dir=str(services_dir / "spool")) as gateway:
        await gateway.directory.update_tenant(ACTOR, "acme", TenantChange(redis_loss=policy))
        await gateway.register(server)
        store.stop()
        async with client_of(gateway) as client:
            answers = [await client.post(PATH, json=ASK, headers=KEY) for _ in range(2)]
        if policy == "fail_open":
            assert [answer.status_code for answer in answers] == [200, 200]
            assert not any("idempotent-replayed" in answer.headers for answer in answers)
        else:
            assert {(answer.status_code, error_of(answer)["code"]) for answer in answers} == {
                (503, "service_unavailable")
            }
        assert seen_of(server) == (2 if policy == "fail_open" else 0)


@contextlib.contextmanager
def another_replica(settings: Settings, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "PENSTOCK_SECRET_KEY": settings.secret_key or "",
        "PENSTOCK_FLEET_TOKEN": settings.fleet_token or "",
    }
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_ready(client: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url + "/readyz")).json()["backends"] == 1:
                    return
            await asyncio.sleep(0.1)


async def broken_off(client: httpx.AsyncClient, url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        await client.post(url + PATH, json=ASK, headers=KEY)


async def test_a_killed_replicas_request_is_taken_over(gateway: Any, upstream: Any) -> None:
    closed = asyncio.Event()

    async def stuck(c: Any) -> None:
        await c.wait_closed_by_peer(60)
        closed.set()

    server = await upstream(stuck, paris)
    await gateway.register(server)
    port = free_port()
    other = f"http://127.0.0.1:{port}"
    with another_replica(gateway.settings, port) as process:
        async with client_of(gateway) as client, asyncio.TaskGroup() as group:
            await wait_ready(client, other)
            group.create_task(broken_off(client, other))
            await eventually(lambda: seen_of(server) == 1)
            second = group.create_task(client.post(PATH, json=ASK, headers=KEY))
            await asyncio.sleep(0.1)  # let it ask
            process.kill()
            await closed.wait()
            with redis_client(gateway.settings.redis_url) as direct:  # as if the lease had run out
                entries = direct.keys("*:idempotency:*")
                for name in entries:
                    if direct.type(name) == b"hash" and direct.hexists(name, "owner"):
                        direct.hset(name, "ends", "1")
            answer = await second
    assert answer.json()["choices"][0]["message"]["content"] == "Paris"
    assert "idempotent-replayed" not in answer.headers
    assert seen_of(server) == 2
