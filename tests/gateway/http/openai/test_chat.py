"""The chat door over real sockets, real Postgres and Redis; only the backend is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.tenants.support import ACTOR, budget, concurrent, requests_per_minute
from worker.protocol.usage import MeterReading, encode_meter

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Capital of France?"}]}


@contextlib.asynccontextmanager
async def client_of(gateway: Any, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key or gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
        yield client


def events_of(text: str) -> list[str]:
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part and not part.startswith(":")]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = body["error"]
    assert isinstance(error, dict)
    assert error["message"]
    return error


async def paris(c: Any) -> None:
    if c.body.get("stream"):
        await c.begin()
        await c.token("Par", 1)
        await c.token("is", 2)
        await c.done()
    else:
        await c.whole()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_stream(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with client_of(gateway) as client:
        headers = {"x-request-id": "mine-7", "cookie": "a=b", "x-penstock-tenant-salt": "forged"}
        headers |= {"x-penstock-tenant": "forged", "x-penstock-weight": "1000"}
        answer = await client.post(PATH, json=ASK | {"stream": True, "top_k": 5}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-penstock-backend"] == "w1"
    assert "x-penstock-cost-usd" not in answer.headers
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    assert [json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks] == ["Par", "is"]
    (row,) = await gateway.rows()
    assert str(row.request_id) == answer.headers["x-request-id"]
    assert (row.status, row.prompt_tokens, row.completion_tokens, row.usage_source) == ("ok", 9, 2, "backend")
    assert row.charged_nano_usd == row.cost_nano_usd == 9 * 1000 + 2 * 2000
    assert (row.backend, row.attempts, row.streamed, row.client_request_id) == ("w1", 1, True, "mine-7")
    assert not row.over_bound
    assert 0 <= row.first_token_ms <= row.total_ms
    (seen,) = server.seen
    assert seen.body == ASK | {"stream": True, "top_k": 5, "max_tokens": 50}
    assert seen.headers["x-request-id"] == answer.headers["x-request-id"]
    assert seen.headers["x-penstock-clamp-output"] == "1"
    assert seen.headers["authorization"] == "Bearer fleet-token-of-the-tests"
    assert "forged" not in seen.headers["x-penstock-tenant-salt"]
    assert seen.headers["x-penstock-tenant"] not in ("forged", "acme")
    assert seen.headers["x-penstock-weight"] == "1"
    assert gateway.key not in str(seen)
    assert "cookie" not in seen.headers


async def test_a_whole_answer_costs_what_its_header_says(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK | {"max_completion_tokens": 20, "max_tokens": 10})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["message"]["content"] == "Paris"
    assert answer.headers["x-penstock-cost-usd"] == "0.000015000"
    (row,) = await gateway.rows()
    assert (row.status, row.charged_nano_usd, row.streamed) == ("ok", 15_000, False)
    assert server.seen[0].body == ASK | {"max_completion_tokens": 20}
    assert "x-penstock-clamp-output" not in server.seen[0].headers


async def test_the_official_sdk_is_content(gateway: Any, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        if not c.body.get("stream"):
            await paris(c)
            return
        await c.begin()
        await c.token("Paris", 1)
        if (c.body.get("stream_options") or {}).get("include_usage"):
            await c.event(
                b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
                b'"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
            )
        await c.done()

    await gateway.register(await upstream(answer))
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=gateway.key, max_retries=0) as sdk:
        whole = await sdk.chat.completions.create(**ASK)
        assert whole.choices[0].message.content == "Paris"
        assert whole.usage is not None
        assert whole.usage.total_tokens == 12
        chunks = [chunk async for chunk in await sdk.chat.completions.create(**ASK, stream=True)]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["Paris"]
        stream = await sdk.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [10]
        assert chunks[-1].choices == []
        assert [model.id async for model in sdk.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await sdk.chat.completions.create(**ASK | {"model": "other"})
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="sk-wrong", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.chat.completions.create(**ASK)
    assert [row.status for row in await gateway.rows(3)] == ["ok"] * 3


async def test_bad_requests_are_told_clearly_and_cost_nothing(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    valid = json.dumps(ASK).encode()
    cases: list[tuple[str, bytes, dict[str, str], int, str | None, str | None]] = [
        ("malformed JSON", b'{"model":', {}, 400, None, None),
        ("a list", b"[]", {}, 400, None, None),
        ("deep nesting", b"[" * 200_000, {}, 400, None, None),
        ("no messages", b'{"model":"m","messages":[]}', {}, 400, "messages", None),
        ("unknown model", json.dumps(ASK | {"model": "no\u0000pe"}).encode(), {}, 404, "model", "model_not_found"),
        ("output over the route's", json.dumps(ASK | {"max_tokens": 501}).encode(), {}, 400, "max_tokens", None),
        ("a huge integer", json.dumps(ASK | {"max_tokens": 10**40}).encode(), {}, 400, "max_tokens", None),
        ("form encoding", valid, {"content-type": "application/x-www-form-urlencoded"}, 415, None, None),
        ("no JSON", valid, {"content-type": "text/plain"}, 415, None, None),
        ("compression", valid, {"content-encoding": "gzip"}, 415, None, None),
    ]
    async with client_of(gateway) as client:
        for name, body, headers, status, param, code in cases:
            answer = await client.post(PATH, content=body, headers={"content-type": "application/json"} | headers)
            assert answer.status_code == status, (name, answer.text)
            error = error_of(answer)
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), name
        good = await client.post(PATH, content=valid, headers={"content-type": "application/json; charset=utf-8"})
        assert good.status_code == 200
    assert len(server.seen) == 1
    await gateway.rows(1)


async def test_keys_that_are_not_valid_look_alike(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(paris))
    revoked, record = await gateway.directory.create_key(ACTOR, "acme", "old")
    await gateway.directory.revoke_key(ACTOR, record.public_id)
    unknown = gateway.key[:12] + ("0" * 12) + gateway.key[24:]
    told = set()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for key in (revoked, unknown, gateway.key[:-1] + "?", gateway.admin_key, "garbage", "sk-penstock-é"):
            answer = await client.post(PATH, json=ASK, headers={b"authorization": f"Bearer {key}".encode("latin-1")})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error_of(answer)["code"] == "invalid_api_key"
            assert key not in answer.text
            told.add(answer.text)
        assert len(told) == 1
        for headers in ({}, {"authorization": ""}, {"authorization": "Basic abc"}):
            answer = await client.post(PATH, json=ASK, headers=headers)
            assert answer.status_code == 401
            error_of(answer)
        usage_only, _ = await gateway.directory.create_key(ACTOR, "acme", "reports", scopes={"usage:read"})
        answer = await client.post(PATH, json=ASK, headers={"authorization": f"Bearer {usage_only}"})
        assert answer.status_code == 403
        assert error_of(answer)["code"] == "insufficient_scope"
    await gateway.rows(0)


async def test_a_key_may_call_only_its_models(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(paris))
    key, _ = await gateway.directory.create_key(ACTOR, "acme", "narrow", allowed_models={"another"})
    async with client_of(gateway, key) as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        answer = await client.post(PATH, json=ASK)
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"


async def raw_request(gateway: Any, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    lines = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n{head}\r\n"
    writer.write(lines.encode() + body)
    await writer.drain()
    return reader, writer


async def ask_raw(gateway: Any, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps(ASK | fields).encode()
    return await raw_request(gateway, f"content-type: application/json\r\ncontent-length: {len(body)}\r\n", body)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hang_up_is_seen_though_another_request_waits_behind(gateway: Any, upstream: Any, stream: bool) -> None:
    closed: list[float] = []

    async def generates(c: Any) -> None:
        await c.begin()
        await c.meter(9, 3)
        closed.append(await c.wait_closed_by_peer())

    server = await upstream(generates)
    await gateway.register(server)
    body = json.dumps(ASK | {"stream": stream}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {gateway.key}\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request + request)
    await eventually(lambda: bool(server.seen))
    await asyncio.sleep(0.3)
    assert not closed
    writer.close()
    await eventually(lambda: bool(closed))
    (row,) = await gateway.rows()
    assert (row.status, row.completion_tokens) == ("aborted", 3)


async def test_a_body_over_the_limit_is_refused_before_it_is_read(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(max_body_bytes=1000) as gateway:
        json_type = "content-type: application/json\r\n"
        reader, writer = await raw_request(gateway, json_type + "content-length: 9000000000\r\n", b"{")
        async with asyncio.timeout(5):
            told = await reader.read()
        writer.close()
        assert told.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in told
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"

        reader, writer = await raw_request(gateway, json_type + "transfer-encoding: chunked\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(3):
                writer.write(b"200\r\n" + b" " * 512 + b"\r\n")
                await writer.drain()
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()

        await gateway.register(await upstream(paris))
        padding = 1000 - len(json.dumps(ASK).encode())
        async with client_of(gateway) as client:
            for size, status in ((padding, 200), (padding + 1, 413)):
                body = json.dumps(ASK).encode() + b" " * size
                answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == status


async def test_a_body_that_never_ends_or_a_client_that_leaves_in_it_costs_nothing(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    _, writer = await raw_request(gateway, "content-type: application/json\r\ncontent-length: 100\r\n", b'{"model"')
    await asyncio.sleep(0.1)
    writer.close()
    async with client_of(gateway) as client:
        assert (await client.post(PATH, json=ASK)).status_code == 200
    assert len(server.seen) == 1
    await gateway.rows(1)


async def test_a_body_that_does_not_arrive_in_time_is_refused(start_gateway: Any) -> None:
    async with start_gateway(body_timeout_s=0.2) as gateway:
        reader, writer = await raw_request(gateway, "content-type: application/json\r\ncontent-length: 100\r\n", b"{")
        async with asyncio.timeout(20):
            told = await reader.read()
        writer.close()
        assert told.startswith(b"HTTP/1.1 408 ")
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_body_timeout"


async def test_errors_of_the_framework_speak_openai_too(gateway: Any) -> None:
    async with client_of(gateway) as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/v1/chat/completions/", 401),
            ("GET", PATH, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/none", 404),
        ):
            answer = await client.request(method, path, headers={} if status != 401 else {"authorization": ""})
            assert answer.status_code == status, (method, path, answer.text)
            assert error_of(answer)["type"] in ("invalid_request_error", "authentication_error")


async def test_a_cut_in_mid_stream_is_an_error_event_without_done(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await asyncio.sleep(0.05)

    await gateway.register(await upstream(cut))
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK | {"stream": True})
    assert answer.status_code == 200
    first, last = events_of(answer.text)
    assert "finish_reason" in first
    assert json.loads(last)["error"]["code"] == "backend_disconnected"
    assert "[DONE]" not in answer.text
    (row,) = await gateway.rows()
    assert (row.status, row.error_code, row.completion_tokens) == ("failed", "backend_disconnected", 1)
    assert row.charged_nano_usd == 9000 + 2000


async def test_a_whole_answer_that_is_cut_is_an_error_and_not_charged(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.meter(9, 30)
        await asyncio.sleep(0.05)

    await gateway.register(await upstream(cut))
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK)
    assert answer.status_code == 502
    assert error_of(answer)["code"] == "backend_disconnected"
    (row,) = await gateway.rows()
    assert (row.status, row.error_code, row.charged_nano_usd) == ("failed", "backend_disconnected", 0)
    # What it cost us is told all the same.
    assert (row.completion_tokens, row.cost_nano_usd) == (30, 9 * 1000 + 30 * 2000)


async def test_the_workers_refusal_is_passed_on_and_not_charged(gateway: Any, upstream: Any) -> None:
    told = {"message": "4000 tokens do not fit", "type": "invalid_request_error", "param": "messages"}
    told |= {"code": "context_length_exceeded"}

    async def refuses(c: Any) -> None:
        await c.status(400, json.dumps({"error": told}).encode())

    await gateway.register(await upstream(refuses))
    async with client_of(gateway) as client:
        for stream in (False, True):
            answer = await client.post(PATH, json=ASK | {"stream": stream})
            assert answer.status_code == 400
            assert error_of(answer) == told
    for row in await gateway.rows(2):
        assert (row.status, row.error_code) == ("failed", "context_length_exceeded")
        assert (row.charged_nano_usd, row.attempts) == (0, 1)


async def test_without_a_worker_there_is_a_503(gateway: Any, upstream: Any) -> None:
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_backend_available"
        assert int(answer.headers["retry-after"]) >= 1
        await gateway.rows(0)
        server = await upstream(paris)
        await server.stop()
        await gateway.register(server)  # it died, and its record still lives
        answer = await client.post(PATH, json=ASK | {"stream": True})
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_backend_available"
    (row,) = await gateway.rows()
    assert (row.status, row.charged_nano_usd) == ("failed", 0)


async def test_another_worker_takes_over_before_the_first_token_and_bills_once(gateway: Any, upstream: Any) -> None:
    async def dies(c: Any) -> None:
        await c.begin()
        await c.meter(9, 1)
        await asyncio.sleep(0.02)
        c.reset()

    bad, good = await upstream(dies), await upstream(paris)
    await gateway.register(bad, "w1")
    await gateway.register(good, "w2")
    async with client_of(gateway) as client:
        served = 0
        while not bad.seen:  # which of two equals is asked first is left to chance
            answer = await client.post(PATH, json=ASK | {"stream": True})
            assert answer.headers["x-penstock-backend"] == "w2"
            assert events_of(answer.text)[-1] == "[DONE]"
            served += 1
    rows = await gateway.rows(served)
    assert sum(row.attempts for row in rows) == served + len(bad.seen)
    assert all((row.status, row.completion_tokens, row.backend) == ("ok", 2, "w2") for row in rows)
    assert {row.charged_nano_usd for row in rows} == {13_000}
    assert sum(row.cost_nano_usd for row in rows) == served * 13_000 + len(bad.seen) * 11_000  # all that was done


async def test_a_waiting_stream_gets_comments_and_then_its_answer(start_gateway: Any, upstream: Any) -> None:
    async def slow(c: Any) -> None:
        await c.begin()
        await asyncio.sleep(0.35)
        await c.token("Par", 1)
        for _ in range(6):  # signs of life of the worker are not the client's
            await asyncio.sleep(0.06)
            await c.meter(9, 1)
        await c.token("is", 2)
        await c.done()

    async with start_gateway(keepalive_s=0.1) as gateway:
        await gateway.register(await upstream(slow))
        async with client_of(gateway) as client:
            answer = await client.post(PATH, json=ASK | {"stream": True})
        parts = [part for part in answer.text.split("\n\n") if part]
        assert parts[0].startswith(":")
        positions = [place for place, part in enumerate(parts) if not part.startswith(":")]
        assert positions[0] >= 2
        assert positions[1] - positions[0] >= 3
        assert "penstock-meter" not in answer.text
        assert events_of(answer.text)[-1] == "[DONE]"
        await gateway.rows(1)


@pytest.mark.parametrize("asked", [False, True])
async def test_the_usage_chunk_comes_once_and_only_if_asked_for(gateway: Any, upstream: Any, asked: bool) -> None:
    async def chatty(c: Any) -> None:
        await c.begin()
        await c.token("Paris", 1)
        await c.event(b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}')
        await c.done()

    await gateway.register(await upstream(chatty))
    async with client_of(gateway) as client:
        options = {"stream_options": {"include_usage": True}} if asked else {}
        answer = await client.post(PATH, json=ASK | {"stream": True} | options)
    assert answer.text.count('"usage":{') == int(asked)
    (row,) = await gateway.rows()
    assert (row.prompt_tokens, row.completion_tokens) == (9, 1)


async def test_requests_per_minute(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(limits=[requests_per_minute(2)]) as gateway:
        await gateway.register(await upstream(paris))
        async with client_of(gateway) as client:
            left = []
            for _ in range(2):
                answer = await client.post(PATH, json=ASK)
                assert answer.status_code == 200
                assert answer.headers["x-ratelimit-limit-requests"] == "2"
                left.append(answer.headers["x-ratelimit-remaining-requests"])
            assert left == ["1", "0"]
            for stream in (True, False):
                answer = await client.post(PATH, json=ASK | {"stream": stream})
                assert answer.status_code == 429
                assert error_of(answer)["code"] == "rate_limit_exceeded"
                assert 1 <= int(answer.headers["retry-after"]) <= 61
                assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        await gateway.rows(2)


async def test_concurrent_requests(start_gateway: Any, upstream: Any) -> None:
    release = asyncio.Event()

    async def waits(c: Any) -> None:
        await release.wait()
        await paris(c)

    async with start_gateway(limits=[concurrent(1)]) as gateway:
        server = await upstream(waits)
        await gateway.register(server)
        async with client_of(gateway) as client, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(client.post(PATH, json=ASK))
            await eventually(lambda: bool(server.seen))
            answer = await client.post(PATH, json=ASK)
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "rate_limit_exceeded"
            release.set()
            assert (await first).status_code == 200
            for _ in range(5):  # its slot is free when the answer is here
                assert (await client.post(PATH, json=ASK)).status_code == 200


async def test_a_budget_is_never_overdrawn_by_requests_at_once(start_gateway: Any, upstream: Any) -> None:
    # A request of 50 tokens of output reserves at most 1000 * 1000 + 50 * 2000 nano-USD by the route's context.
    async with start_gateway(limits=[budget(1_000_000)]) as gateway:
        await gateway.register(await upstream(paris))
        async with client_of(gateway) as client:
            answers = await asyncio.gather(*(client.post(PATH, json=ASK | {"stream": True}) for _ in range(8)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses[0] == 200
            assert statuses[-1] == 429
            for answer in answers:
                if answer.status_code == 429:
                    error = error_of(answer)
                    assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
            answer = await client.post(PATH, json=ASK | {"max_tokens": 500})
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "insufficient_quota"
        await gateway.rows(statuses.count(200))


async def test_changed_limits_and_revoked_keys_are_in_force_at_once(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway() as gateway:
        await gateway.register(await upstream(paris))
        async with client_of(gateway) as client:
            assert (await client.post(PATH, json=ASK)).status_code == 200
            async with announcing(gateway) as directory:
                limit = await directory.set_limit(ACTOR, "acme", requests_per_minute(0))
                answer = await client.post(PATH, json=ASK)
                assert answer.status_code == 429
                assert "retry-after" not in answer.headers  # no waiting helps
                await directory.delete_limit(ACTOR, "acme", limit.id)
                assert (await client.post(PATH, json=ASK)).status_code == 200
                public_id = gateway.key.removeprefix("sk-penstock-")[:12]
                await directory.revoke_key(ACTOR, public_id)
                assert (await client.post(PATH, json=ASK)).status_code == 401


async def test_the_price_is_the_one_in_force_by_the_time_of_redis(start_gateway: Any, upstream: Any) -> None:
    from gateway.clock import SystemClock

    class Behind(SystemClock):
        def now(self) -> datetime:
            return super().now() - timedelta(days=2)

    async with start_gateway(gateway_clock=Behind()) as gateway:
        new = await gateway.set_price("m", "10", "20", effective_from=datetime.now(UTC) - timedelta(days=1))
        await gateway.register(await upstream(paris))
        async with client_of(gateway) as client:
            assert (await client.post(PATH, json=ASK)).status_code == 200
        (row,) = await gateway.rows()
        assert row.price_id == new.id
        assert row.charged_nano_usd == 9 * 10_000 + 3 * 20_000


async def test_a_price_that_begins_between_planning_and_admission_is_the_one_charged(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.admission.service import Admission

    planned = datetime.now(UTC) - timedelta(days=1)
    new = await gateway.set_price("m", "10", "20", effective_from=planned + timedelta(hours=1))
    await gateway.register(await upstream(paris))
    monkeypatch.setattr(Admission, "now", lambda _: planned)  # a moment later it is admitted: a day, here
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK)
    (row,) = await gateway.rows()
    assert (row.price_id, row.charged_nano_usd) == (new.id, 9 * 10_000 + 3 * 20_000)
    assert answer.headers["x-penstock-cost-usd"] == "0.000150000"


async def test_a_database_restored_from_a_backup_is_believed(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(paris))
    async with client_of(gateway) as client, announcing(gateway) as directory:
        assert (await client.post(PATH, json=ASK)).status_code == 200
        tenant = await directory.tenant("acme")
        await directory._tell(tenant.id, tenant.generation + 5)  # changes that the backup does not have
        assert (await client.post(PATH, json=ASK)).status_code == 200
        assert (await client.post(PATH, json=ASK)).status_code == 200


@contextlib.asynccontextmanager
async def announcing(gateway: Any) -> AsyncIterator[Any]:
    """Another process that changes tenants, as the command line does."""
    from gateway.admission.wiring import create_admission
    from gateway.clock import SystemClock
    from gateway.tenants.directory import Directory

    clock = SystemClock()
    admission = create_admission(gateway.settings, gateway.engine, clock)
    await admission.start()
    yield Directory(gateway.engine, clock, announce=admission.announce_generation)
    await admission.close()


async def test_a_client_that_does_not_read_is_cut_off_in_the_end(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.routing.route import Route

    closed: list[float] = []

    async def floods(c: Any) -> None:
        await c.begin()
        with contextlib.suppress(ConnectionError):
            for number in range(1000):
                await c.token("x" * 100_000, number + 1)
        closed.append(await c.wait_closed_by_peer())

    monkeypatch.setattr("gateway.http.inference.SEND_GRACE_S", 0.3)
    await gateway.create_route(Route("short", "pool", "m", 1000, 50, 500, 0.5))
    await gateway.set_price("short", "1", "2")
    await gateway.register(await upstream(floods))
    _, writer = await ask_raw(gateway, stream=True, model="short")
    (row,) = await gateway.rows()
    assert row.status in ("aborted", "failed")
    assert row.completion_tokens > 0
    assert 400 <= row.total_ms < 5000
    await eventually(lambda: bool(closed))
    writer.close()


async def test_a_route_without_a_price_is_refused_or_served_and_marked(gateway: Any, upstream: Any) -> None:
    from gateway.routing.route import Route

    await gateway.register(await upstream(paris))
    for name, policy in (("unpriced", "refuse"), ("free", "serve")):
        await gateway.create_route(Route(name, "pool", "m", 1000, 50, 500, 30.0, policy))
    async with client_of(gateway) as client:
        async with asyncio.timeout(8):
            while (await client.get("/v1/models/free")).status_code != 200:  # noqa: ASYNC110 - its cache lives 5 s
                await asyncio.sleep(0.1)
        answer = await client.post(PATH, json=ASK | {"model": "unpriced"})
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "model_not_priced"
        answer = await client.post(PATH, json=ASK | {"model": "free"})
        assert answer.status_code == 200
        assert answer.json()["model"] == "free"  # the worker calls it "m"
        assert float(answer.headers["x-penstock-cost-usd"]) == 0
    (row,) = await gateway.rows()
    assert (row.price_id, row.charged_nano_usd, row.prompt_tokens) == (None, 0, 9)


async def test_a_fault_of_our_own_is_a_500_and_the_row_failed(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bursts(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    def broken(_data: bytes) -> bytes:
        raise ZeroDivisionError("secret detail")

    await gateway.register(await upstream(bursts))
    monkeypatch.setattr("gateway.http.openai.door.encode_event", broken)
    async with client_of(gateway) as client:
        with pytest.raises(httpx.HTTPError):  # the head had left: all that remains is to cut it
            await client.post(PATH, json=ASK | {"stream": True})
        monkeypatch.undo()
        monkeypatch.setattr("gateway.http.openai.chat.parse_chat", broken)
        answer = await client.post(PATH, json=ASK)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert error_of(answer)["code"] == "internal_error"
    (row,) = await gateway.rows(1)
    assert row.completion_tokens == 1


async def test_many_events_in_one_packet_and_one_event_in_many(gateway: Any, upstream: Any) -> None:
    reading = encode_meter(MeterReading(9, 3))

    async def torn(c: Any) -> None:
        wire = reading + 'data: {"choices":[{"delta":{"content":"né😀"}}]}\r\n\r\n'.encode() * 3
        await c.begin()
        for byte in wire:
            await c.send_piece(bytes([byte]))
        await c.send_piece(wire + b"data: [DONE]\n\n")
        await c.send(b"0\r\n\r\n")

    await gateway.register(await upstream(torn))
    async with client_of(gateway) as client:
        answer = await client.post(PATH, json=ASK | {"stream": True})
    *chunks, done = events_of(answer.text)
    assert [json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks] == ["né😀"] * 6
    assert done == "[DONE]"
