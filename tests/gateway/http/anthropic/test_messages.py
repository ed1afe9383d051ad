"""The Messages door over real sockets, with real Postgres and Redis and Anthropic's SDK; only backends are scripted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.gateway.tenants.support import ACTOR

PATH = "/v1/messages"
QUESTION = {"role": "user", "content": "Capital of France?"}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": [QUESTION]}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def sdk_of(gateway: Any, key: str | None = None) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key or gateway.key, max_retries=0)


def http_of(gateway: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": gateway.key}, timeout=20)


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish} | more
    return json.dumps({"id": "chat-1", "object": "chat.completion.chunk", "model": "b", "choices": [choice]}).encode()


def usage_chunk() -> bytes:
    return json.dumps({"id": "chat-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}).encode()


def completion(message: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish} | more
    return json.dumps({"id": "chat-1", "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


async def paris(c: Any) -> None:
    if not c.body.get("stream"):
        await c.whole(completion({"content": "Paris"}))
        return
    await c.begin()
    await c.meter(9, 1)
    for event in (chunk({"role": "assistant", "content": ""}), chunk({"content": "Par"}), chunk({"content": "is"})):
        await c.event(event)
    await c.meter(9, 3)
    await c.event(chunk({}, "stop"))
    await c.event(usage_chunk())
    await c.done()


async def calls_two_tools(c: Any) -> None:
    def call(index: int, arguments: str, **begun: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments} | begun.pop("f", {})} | begun]}

    await c.begin()
    for piece in (
        {"reasoning_content": "Two "},
        {"reasoning_content": "cities."},
        {"content": "I look."},
        call(0, "", id="call_a", type="function", f={"name": "weather"}),
        call(0, '{"city": "Pa'),
        call(0, 'ris"}'),
        call(1, '{"city":', id="call_b", type="function", f={"name": "weather"}),
        call(1, ' "Rom"}'),
    ):
        await c.event(chunk(piece))
    await c.event(chunk({}, "tool_calls"))
    await c.event(usage_chunk())
    await c.done()


def frames_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    frames = []
    for frame in text.strip().split("\n\n"):
        event, data = frame.split("\n")
        frames.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return frames


async def test_a_whole_answer(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with sdk_of(gateway) as sdk:
        raw = await sdk.messages.with_raw_response.create(
            **ASK, system="Be short.", stop_sequences=["\n"], metadata={"user_id": "ann"}, extra_body={"seed": 7}
        )
        message = await raw.parse()
    assert (message.id, message.model, message.role, message.type) == ("chat-1", "m", "assistant", "message")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "Paris"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 3)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 1
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == message._request_id
    assert raw.headers["x-penstock-cost-usd"] == "0.000015000"
    (row,) = await gateway.rows()
    assert (row.status, row.api, row.prompt_tokens, row.completion_tokens) == ("ok", "messages", 9, 3)
    assert str(row.request_id) == raw.headers["request-id"]
    assert row.end_user
    assert server.seen[0].head.startswith("POST /v1/chat/completions ")
    assert server.seen[0].body == {
        "model": "m",
        "max_tokens": 20,
        "messages": [{"role": "system", "content": "Be short."}, QUESTION],
        "stop": ["\n"],
        "user": "ann",
        "seed": 7,
    }

    def block() -> list[str]:
        with anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as sdk:
            whole = sdk.messages.create(**ASK)
            with sdk.messages.stream(**ASK) as stream:
                return [whole.content[0].text, stream.get_final_text()]  # type: ignore[union-attr]

    assert await asyncio.to_thread(block) == ["Paris", "Paris"]


async def test_a_stream(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with http_of(gateway) as client:
        answer = await client.post(PATH, json=ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    frames = frames_of(answer.text)
    assert all(event == data["type"] for event, data in frames)
    start, *pieces, delta, stop = [data for _, data in frames]
    assert (start["message"]["id"], start["message"]["model"], start["message"]["content"]) == ("chat-1", "m", [])
    assert start["message"]["stop_reason"] is None
    text = {"type": "text_delta"}
    assert pieces == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": text | {"text": "Par"}},
        {"type": "content_block_delta", "index": 0, "delta": text | {"text": "is"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (delta["usage"]["input_tokens"], delta["usage"]["output_tokens"]) == (5, 3)
    assert stop == {"type": "message_stop"}
    assert server.seen[0].body["stream_options"] == {"include_usage": True}
    (row,) = await gateway.rows()
    assert (row.status, row.api, row.streamed, row.completion_tokens) == ("ok", "messages", True, 3)


async def test_tools_there_and_back(gateway: Any, upstream: Any) -> None:
    server = await upstream(calls_two_tools, paris)
    await gateway.register(server)
    conversation: list[Any] = [QUESTION]
    async with sdk_of(gateway) as sdk:
        arguments = {"tools": TOOLS, "tool_choice": {"type": "any"}}
        async with sdk.messages.stream(**ASK | {"messages": conversation}, **arguments) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert "input_json" in kinds
        assert message.stop_reason == "tool_use"
        thinking, text, first, second = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Two cities.")  # type: ignore[union-attr]
        assert (text.type, text.text) == ("text", "I look.")  # type: ignore[union-attr]
        assert (first.id, first.name, first.input) == ("call_a", "weather", {"city": "Paris"})  # type: ignore[union-attr]
        assert (second.id, second.name, second.input) == ("call_b", "weather", {"city": "Rom"})  # type: ignore[union-attr]
        results = [
            {"type": "text", "text": "Here:"},
            {"type": "tool_result", "tool_use_id": "call_a", "content": "18"},
            {"type": "tool_result", "tool_use_id": "call_b", "content": "no such city", "is_error": True},
        ]
        conversation += [message.to_param(), {"role": "user", "content": results}]
        final = await sdk.messages.create(**ASK | {"messages": conversation}, tools=TOOLS)
        assert final.content[0].text == "Paris"  # type: ignore[union-attr]
    asked = server.seen[0].body
    assert asked["tool_choice"] == "required"
    assert asked["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]
    _, assistant, *results_sent, said = server.seen[1].body["messages"]
    assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]] == [
        {"city": "Paris"},
        {"city": "Rom"},
    ]
    assert assistant["content"] == "I look."
    assert results_sent == [
        {"role": "tool", "tool_call_id": "call_a", "content": "18"},
        {"role": "tool", "tool_call_id": "call_b", "content": "Error: no such city"},
    ]
    assert said == {"role": "user", "content": "Here:"}
    assert [row.api for row in await gateway.rows(2)] == ["messages"] * 2


async def test_each_fault_raises_its_class(gateway: Any, upstream: Any) -> None:
    async def refuses(c: Any) -> None:
        body = (
            b'{"error":{"message":"temperature is too high","type":"invalid_request_error","param":null,"code":null}}'
        )
        await c.status(400, body)

    async def breaks_off(c: Any) -> None:
        await c.begin()

    await gateway.register(await upstream(refuses, breaks_off))
    admin, _ = await gateway.directory.create_key(ACTOR, "acme", "reports", scopes={"usage:read"})
    async with sdk_of(gateway) as sdk:
        for change, said in (
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 501}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"system": 5}, "system"),
            ({"tools": {}}, "tools"),
            ({"metadata": {"user_id": "u" * 513}}, "user_id"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
            ({"temperature": 1.0}, "temperature is too high"),
        ):
            body: dict[str, Any] = ASK | change
            extra = {"temperature": body.pop("temperature")} if "temperature" in body else {}
            with pytest.raises(anthropic.BadRequestError, match=said) as caught:
                await sdk.messages.create(**body, extra_body=extra)
            assert caught.value.type == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.messages.create(**ASK | {"model": "other"})
        assert missing.value.type == "not_found_error"
        assert missing.value.request_id
        with pytest.raises(anthropic.InternalServerError) as broken:
            await sdk.messages.create(**ASK)
        assert (broken.value.status_code, broken.value.type) == (502, "api_error")
    for key, kind, named in (
        ("sk-wrong", anthropic.AuthenticationError, "authentication_error"),
        (admin, anthropic.PermissionDeniedError, "permission_error"),
    ):
        async with sdk_of(gateway, key) as sdk:
            with pytest.raises(kind) as refused:
                await sdk.messages.create(**ASK)
            assert refused.value.type == named
    async with http_of(gateway) as client:
        for method, path, content, status, kind_ in (
            ("GET", PATH, None, 405, "invalid_request_error"),
            ("POST", PATH + "/batches", b"{}", 404, "not_found_error"),
            ("POST", PATH, b'{"model":', 400, "invalid_request_error"),
            ("POST", PATH + "/count_tokens", b"[" * 100_000, 400, "invalid_request_error"),
            ("POST", PATH, b"{}", 400, "invalid_request_error"),
        ):
            answer = await client.request(method, path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == status
            told = answer.json()
            assert set(told) == {"type", "error", "request_id"}
            assert (told["type"], told["error"]["type"]) == ("error", kind_)
            assert told["request_id"] == answer.headers["request-id"]
