"""Requests through every door: the prompt log has of each what its row says, and what was said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.redis_url import ClusterAddress, parse_redis_url
from tests.gateway.conftest import Conversation, chunk_event, whole_event
from tests.gateway.http import websocket_client
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway

CHAT = "/v1/chat/completions"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Ask about Paris"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: MESSAGES,
    "/v1/completions": {"prompt": "Ask about Paris"},
    "/v1/responses": {"input": "Ask about Paris"},
    "/v1/messages": MESSAGES | {"max_tokens": 20},
}
TOOL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
ALIKE = (
    *("request_id", "project_id", "key_id", "end_user", "api", "backend", "status", "error_code", "streamed"),
    *("attempts", "prompt_tokens", "completion_tokens", "cached_tokens", "charged_nano_usd", "first_token_ms"),
    *("total_ms", "client_request_id"),
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    if isinstance(parse_redis_url(redis_server), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    async with shared_gateway(databases, redis_server, tmp_path_factory.mktemp("gateway")) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


async def logging(gateway: Any, level: str = "full", **more: Any) -> None:
    await change(gateway, prompt_log={"level": level, "opt_out": True} | more)


async def change(gateway: Any, **policies: Any) -> None:
    """By the gateway's own door: it holds from then on."""
    headers = {"authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as admin:
        changed = await admin.patch("/admin/v1/tenants/acme", json=policies)
    assert changed.status_code == 200, changed.text


def client_of(gateway: Any, **more: str) -> httpx.AsyncClient:
    told = {
        "authorization": f"Bearer {gateway.key}",
        "cookie": "session=cookie-of-the-caller",
        "x-internal": "header-of-the-caller",
        "x-penstock-tags": "red,blue",
        "x-penstock-end-user": "ann",
    }
    return httpx.AsyncClient(base_url=gateway.url, headers=told | more, timeout=20)


async def entry(gateway: Any, request_id: str) -> Any:
    """Once it is written."""
    headers = {"authorization": f"Bearer {gateway.admin_key}"}
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as admin:
        while True:
            found = await admin.get(f"/admin/v1/prompts/{request_id}", params={"tenant": "acme"})
            if found.status_code == 200:
                break
            assert found.status_code == 404, found.text
            await asyncio.sleep(0.02)
    for secret in (gateway.key.partition("-")[2], "cookie-of-the", "header-of-the", "fleet-token", "Bearer"):
        assert secret not in found.text
    return found.json()


def says_what_its_row_says(entry: Any, row: Any) -> None:
    told = entry["entry"]
    for name in ALIKE:
        value = getattr(row, name)
        value = str(value) if name in ("request_id", "project_id") else value
        assert told.get(name, {"streamed": False}.get(name, 0 if isinstance(value, int) else None)) == value, name
    assert told["model"] == row.route
    assert told.get("tags", []) == row.tags


def without_logprobs(value: Any) -> Any:
    """What tells a text once more, token by token, is not kept beside one that is redacted."""
    if isinstance(value, dict):
        return {name: None if name == "logprobs" else without_logprobs(each) for name, each in value.items()}
    return [without_logprobs(each) for each in value] if isinstance(value, list) else value


def text_of(response: Any) -> str:
    return json.dumps(response)


def completion(text: str, finish: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return json.dumps({"id": "c", "object": "text_completion", "model": "m", "choices": [choice]} | more).encode()


def call(**more: Any) -> bytes:
    """A piece of the first call of a tool."""
    delta = {"tool_calls": [{"index": 0} | more]}
    return chunk_event(None, choices=[{"index": 0, "delta": delta, "finish_reason": None}])


async def answers(c: Conversation) -> None:
    """At either door of a worker, a chat with the call of a tool."""
    streamed, a_chat = c.body.get("stream"), "/chat/" in c.head
    if not streamed and not a_chat:
        await c.whole(completion("All about Paris", "stop", usage=USAGE))
    elif not streamed:
        body = json.loads(whole_event("All about Paris"))
        body["choices"][0]["message"]["tool_calls"] = [TOOL]
        await c.whole(json.dumps(body).encode())
    else:
        await c.begin()
        for text in ("All ab", "out Paris"):
            await c.meter(9, 2)
            await c.event(chunk_event(text) if a_chat else completion(text, None))
        if a_chat:
            await c.event(call(**TOOL | {"function": {"name": "look_up", "arguments": '{"city": '}}))
            await c.event(call(function={"arguments": '"Paris"}'}))
        await c.meter(9, 3)
        await c.event(chunk_event(None, finish="tool_calls") if a_chat else completion("", "stop"))
        if (c.body.get("stream_options") or {}).get("include_usage"):
            await c.event(chunk_event(None, choices=[], usage=USAGE))
        await c.done()


@pytest.mark.parametrize("level", ["redacted", "full"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_what_was_said_at_every_door(
    gateway: SharedGateway, shared: Shared, path: str, stream: bool, level: str
) -> None:
    await shared.script(answers)
    await logging(gateway, level)
    async with client_of(gateway, **{"x-request-id": "theirs-1"}) as client:
        said = await client.post(path, json=BODIES[path] | {"model": "m", "stream": stream})
    assert said.status_code == 200, said.text
    (row,) = await gateway.rows()
    found = await entry(gateway, said.headers["x-request-id"])
    says_what_its_row_says(found, row)
    assert found["entry"]["level"] == level
    assert found["request"] == BODIES[path] | {"model": "m", "stream": stream}
    told = text_of(found["response"])
    assert "All about Paris" in told, told
    assert path == "/v1/completions" or ("look_up" in told and "call_1" in told and "city" in told), told
    assert '_tokens": 9' in told, told
    if not stream:
        assert found["response"] == (without_logprobs(said.json()) if level == "redacted" else said.json())


async def test_metadata_alone(gateway: SharedGateway, shared: Shared) -> None:
    await shared.script(answers)
    await logging(gateway, "metadata")
    async with client_of(gateway) as client:
        said = await client.post(CHAT, json=MESSAGES | {"model": "m", "stream": True})
    (row,) = await gateway.rows()
    found = await entry(gateway, said.headers["x-request-id"])
    says_what_its_row_says(found, row)
    assert (found["request"], found["response"]) == (None, None)


async def test_a_websocket_is_logged_and_may_keep_itself_out(gateway: SharedGateway, shared: Shared) -> None:
    await shared.script(answers)
    await logging(gateway)
    for told in ({}, {"x_penstock_log": "off"}):
        async with websocket_client.opened(gateway, **told) as connection:
            await websocket_client.ask(connection, MESSAGES | {"model": "m"})
            assert (await websocket_client.answer(connection))[-1] == "[DONE]"
    row, silent = await gateway.rows(2)
    found = await entry(gateway, str(row.request_id))
    says_what_its_row_says(found, row)
    assert found["request"] == MESSAGES | {"model": "m"}
    assert "All about Paris" in text_of(found["response"])
    assert await missing(gateway, str(silent.request_id))


async def missing(gateway: Any, request_id: str) -> bool:
    """Entries are written in their order: behind another one, it would be there."""
    async with client_of(gateway) as client:
        later = await client.post(CHAT, json=MESSAGES | {"model": "m"})
    await entry(gateway, later.headers["x-request-id"])
    headers = {"authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as admin:
        found = await admin.get(f"/admin/v1/prompts/{request_id}", params={"tenant": "acme"})
    return found.status_code == 404


@pytest.mark.parametrize("opt_out", [False, True])
async def test_a_request_keeps_itself_out_if_the_policy_lets_it(
    gateway: SharedGateway, shared: Shared, opt_out: bool
) -> None:
    await shared.script(answers)
    await logging(gateway, opt_out=opt_out)
    async with client_of(gateway, **{"x-penstock-log": "off"}) as client:
        said = await client.post(CHAT, json=MESSAGES | {"model": "m"})
    if opt_out:
        assert await missing(gateway, said.headers["x-request-id"])
    else:
        assert (await entry(gateway, said.headers["x-request-id"]))["entry"]["status"] == "ok"


@pytest.mark.parametrize("after", ["nothing", "text", "half a call"])
async def test_what_came_before_the_client_left(gateway: SharedGateway, shared: Shared, after: str) -> None:
    async def interrupted(c: Conversation) -> None:
        await c.begin()
        if after != "nothing":
            await c.token("All ab", 1)
        if after == "half a call":
            await c.event(call(**TOOL | {"function": {"name": "look_up", "arguments": '{"city": '}}))
        await c.wait_closed_by_peer()

    server = await shared.script(interrupted)
    await logging(gateway)
    async with client_of(gateway) as client:
        marks = {"text": "All ab", "half a call": "look_up"}
        async with asyncio.timeout(10):
            if after not in marks:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(CHAT, json=MESSAGES | {"model": "m", "stream": True}, timeout=0.3)
            else:
                async with client.stream("POST", CHAT, json=MESSAGES | {"model": "m", "stream": True}) as stream:
                    async for line in stream.aiter_lines():
                        if marks[after] in line:
                            break
    (row,) = await gateway.rows()
    assert len(server.seen) == 1
    found = await entry(gateway, str(row.request_id))
    says_what_its_row_says(found, row)
    assert row.status == "aborted"
    told = text_of(found["response"])
    assert ("All ab" in told) == (after in ("text", "half a call"))
    assert ("look_up" in told) == (after == "half a call")
    if after != "nothing":
        assert found["response"]["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("broken", ["refused", "cut"])
async def test_what_came_before_the_backend_failed(
    gateway: SharedGateway, shared: Shared, broken: str, stream: bool
) -> None:
    async def fails(c: Conversation) -> None:
        if broken == "refused":
            await c.status(400, b'{"error": {"message": "the backend says sk-backend-secret-0123456789abcdef"}}')
            return
        await c.begin()
        await c.token("All ab", 1)
        await asyncio.sleep(0.1)
        c.reset()

    await shared.script(fails)
    await logging(gateway)
    async with client_of(gateway) as client:
        await client.post(CHAT, json=MESSAGES | {"model": "m", "stream": stream})
    (row,) = await gateway.rows()
    found = await entry(gateway, str(row.request_id))
    says_what_its_row_says(found, row)
    assert row.status == "failed"
    assert ("All ab" in text_of(found["response"])) == (broken == "cut" and stream)
    assert "sk-backend" not in text_of(found)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_kept_and_replayed_answers_are_logged_as_any_other(
    gateway: SharedGateway, shared: Shared, stream: bool
) -> None:
    await shared.script(answers)
    await logging(gateway)
    await change(gateway, answer_cache={"mode": "exact", "tool_calls": True})
    body = MESSAGES | {"model": "m", "stream": stream, "temperature": 0, "seed": int(stream)}
    asked = 0
    try:
        async with client_of(gateway) as client, asyncio.timeout(20):
            while True:
                asked += 1
                hit = await client.post(CHAT, json=body)
                if hit.headers["x-penstock-cache"] == "exact":
                    break
            once = {"idempotency-key": f"once-{stream}", "x-penstock-cache": "off"}
            await client.post(CHAT, json=body, headers=once)
            while True:
                asked += 1
                replay = await client.post(CHAT, json=body, headers=once)
                if stream or replay.headers.get("idempotent-replayed"):
                    break
    finally:
        await change(gateway, answer_cache={})
    rows = {str(row.request_id): row for row in await gateway.rows(asked + 1)}
    for answer, status in ((hit, "cache_hit"), (replay, "replayed")):
        request_id = answer.headers["x-request-id"]
        found = await entry(gateway, request_id)
        says_what_its_row_says(found, rows[request_id])
        assert rows[request_id].status == status
        assert found["request"] == body
        (choice,) = found["response"]["choices"]
        assert choice["message"]["content"] == "All about Paris"
        assert choice["message"]["tool_calls"] == [TOOL], status
    assert (await entry(gateway, hit.headers["x-request-id"]))["entry"]["cache"] == "exact"


SECRETS = {
    "CARD": "4111 1111 1111 1111",
    "EMAIL": "jean.dupont@exemple.fr",
    "API_KEY": "sk-live-Zx81Kq02Lm9Tz7Yc3Wv5Bn",
    "PRIVATE_KEY": "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----",
}


@pytest.mark.parametrize("kind", SECRETS)
async def test_a_secret_is_blacked_out_wherever_the_stream_is_cut(
    gateway: SharedGateway, shared: Shared, kind: str
) -> None:
    secret = SECRETS[kind]
    cuts = range(len(secret) + 1)

    async def cut(c: Conversation) -> None:
        at = int(c.body["messages"][0]["content"])
        await c.begin()
        for number, text in enumerate(("It is ", secret[:at], secret[at:], " indeed"), 1):
            await c.token(text, number)
        await c.event(call(**TOOL | {"function": {"name": "f", "arguments": json.dumps({"a": secret})[:at]}}))
        await c.event(call(function={"arguments": json.dumps({"a": secret})[at:]}))
        await c.event(chunk_event(None, finish="stop"))
        await c.meter(9, 4)
        await c.done()

    await shared.script(cut)
    await logging(gateway, "redacted")
    asked = []
    async with client_of(gateway) as client:
        for at in cuts:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": str(at)}]}
            said = await client.post(CHAT, json=body)
            assert said.status_code == 200, said.text
            asked.append(said.headers["x-request-id"])
    for request_id in asked:
        found = await entry(gateway, request_id)
        (choice,) = found["response"]["choices"]
        assert choice["message"]["content"] == f"It is [{kind}] indeed"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": f"[{kind}]"}
