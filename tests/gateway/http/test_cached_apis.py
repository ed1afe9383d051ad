"""Each API through its door, first answered by a backend, then from the cache, read by the official SDKs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from gateway.policies.answer_cache import CachePolicy
from tests.gateway.http.cache_support import CHAT, TEXT, asking, being_kept, change, client_of, model, patient
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.http.websocket_client import answer as frames_of
from tests.gateway.http.websocket_client import ask as send
from tests.gateway.http.websocket_client import opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WAYS = pytest.mark.parametrize(("first", "then"), [(False, True), (True, False), (True, True)])
"""Streamed or not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    with patient():
        async with shared_gateway(databases, redis_server, tmp_path_factory.mktemp("gateway")) as made:
            await change(await made.view(), answer_cache=CachePolicy(mode="exact", tool_calls=True))
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    await shared.script(model)
    yield await shared.view()
    shared.check()


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(gateway: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        yield client


async def chat(sdk: openai.AsyncOpenAI, stream: bool, **ask: Any) -> tuple[str, Any, list[Any]]:
    """What the head says of the cache, the completion (put together by the SDK itself) and the chunks."""
    if not stream:
        raw = await sdk.chat.completions.with_raw_response.create(**ask)
        return raw.headers["x-penstock-cache"], raw.parse(), []
    raw = await sdk.chat.completions.with_raw_response.create(**ask, stream=True)
    chunks = [chunk async for chunk in raw.parse()]
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return raw.headers["x-penstock-cache"], state.get_final_completion(), chunks


@WAYS
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"logprobs": True}, {"tools": TOOLS}, {"tools": TOOLS, "n": 2}],
    ids=["text", "choices", "logprobs", "tools", "tools-and-choices"],
)
async def test_chat(gateway: Any, sdk: Any, first: bool, then: bool, fields: dict[str, Any]) -> None:
    ask = asking(f"Capital of France? {first} {then} {sorted(fields)}", **fields)
    async with being_kept(gateway):
        outcome, made, _ = await chat(sdk, first, **ask)
    assert outcome == "miss"
    outcome, again, chunks = await chat(sdk, then, **ask)
    assert outcome == "exact"
    for one, other in zip(made.choices, again.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.message.content == other.message.content
        assert one.logprobs == other.logprobs or (one.logprobs and one.logprobs.content == other.logprobs.content)
        calls = [
            [(call.id, call.function.name, call.function.arguments) for call in each.message.tool_calls or ()]
            for each in (one, other)
        ]
        assert calls[0] == calls[1]
        assert len(calls[0]) == (2 if "tools" in fields else 0)
    if then:
        assert all(chunk.usage is None for chunk in chunks)
        assert len(chunks) > 3 * len(made.choices)
        assert [chunk.choices[0].delta.role for chunk in chunks[: len(made.choices)]] == ["assistant"] * len(
            made.choices
        )
    else:
        assert again.usage.total_tokens == 15


async def test_usage_comes_in_a_replayed_stream_only_if_asked_for(gateway: Any, sdk: Any) -> None:
    ask = asking("How much was it?")
    async with being_kept(gateway):
        await chat(sdk, True, **ask)
    for options, usages in ((None, []), ({"include_usage": False}, []), ({"include_usage": True}, [15])):
        outcome, _, chunks = await chat(sdk, True, **ask, stream_options=options)
        assert outcome == "exact"
        assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == usages
        assert [bool(chunk.choices) for chunk in chunks[-2:]] == [True, not usages]


@WAYS
async def test_completions(gateway: Any, sdk: Any, first: bool, then: bool) -> None:
    async def ask(stream: bool) -> tuple[str, list[str], list[str | None]]:
        raw = await sdk.completions.with_raw_response.create(
            model="m", prompt=f"Once {first} {then}", n=2, temperature=0, stream=stream
        )
        texts, reasons = ["", ""], [None, None]
        parts = [part async for part in raw.parse()] if stream else [raw.parse()]
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        return raw.headers["x-penstock-cache"], texts, reasons

    async with being_kept(gateway):
        assert await ask(first) == ("miss", [TEXT] * 2, ["stop"] * 2)
    assert await ask(then) == ("exact", [TEXT] * 2, ["stop"] * 2)


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings(gateway: Any, sdk: Any, encoding: str) -> None:
    async def ask() -> tuple[str, Any]:
        raw = await sdk.embeddings.with_raw_response.create(model="m", input="Once", encoding_format=encoding)
        return raw.headers["x-penstock-cache"], raw.parse()

    async with being_kept(gateway):
        outcome, made = await ask()
    assert outcome == "miss"
    outcome, again = await ask()
    assert (outcome, again) == ("exact", made)
    assert made.usage.prompt_tokens == 4
    assert made.model == "m"


@WAYS
@pytest.mark.parametrize("tools", [False, True])
async def test_responses(gateway: Any, sdk: Any, first: bool, then: bool, tools: bool) -> None:
    calls = {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]} if tools else {}

    async def ask(stream: bool, **more: Any) -> tuple[str, Any]:
        fields = {"model": "m", "input": f"Capital? {first} {then}", "temperature": 0, "store": False} | calls | more
        raw = await sdk.responses.with_raw_response.create(**fields, stream=stream)
        outcome = raw.headers["x-penstock-cache"]
        if not stream:
            return outcome, raw.parse()
        events = [event async for event in raw.parse()]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        return outcome, events[-1].response

    async with being_kept(gateway):
        outcome, made = await ask(first, metadata={"whose": "first"}, user="one")
    assert outcome == "miss"
    outcome, again = await ask(then, metadata={"whose": "then"}, user="one")
    assert outcome == "exact"
    assert (again.metadata, again.user) == ({"whose": "then"}, "one")
    assert again.output_text == made.output_text == ("" if tools else TEXT)
    kinds = [(item.type, getattr(item, "arguments", None)) for item in again.output]
    assert kinds == [(item.type, getattr(item, "arguments", None)) for item in made.output]
    assert again.usage.total_tokens == 15
    assert (await ask(then, user="other"))[0] == "miss"


async def test_stored_responses_are_left_alone(gateway: Any, sdk: Any) -> None:
    for _ in range(2):
        raw = await sdk.responses.with_raw_response.create(model="m", input="Keep this", temperature=0)
        assert raw.headers["x-penstock-cache"] == "bypass"


@WAYS
@pytest.mark.parametrize("tools", [False, True])
async def test_messages(gateway: Any, first: bool, then: bool, tools: bool) -> None:
    calls: dict[str, Any] = {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]} if tools else {}
    said = {"role": "user", "content": f"Capital? {first} {then}"}
    ask = {"model": "m", "max_tokens": 40, "messages": [said], "extra_body": {"temperature": 0}} | calls
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as sdk:

        async def answer(stream: bool) -> tuple[str, Any]:
            if not stream:
                raw = await sdk.messages.with_raw_response.create(**ask)
                return raw.headers["x-penstock-cache"], await raw.parse()
            async with sdk.messages.stream(**ask) as events:
                message = await events.get_final_message()
                return events.response.headers["x-penstock-cache"], message

        async with being_kept(gateway):
            outcome, made = await answer(first)
        assert outcome == "miss"
        outcome, again = await answer(then)
    assert outcome == "exact"
    assert [block.type for block in made.content] == (["tool_use"] * 2 if tools else ["text"])
    shown = [
        [(getattr(block, "text", None), getattr(block, "name", None), getattr(block, "input", None)) for block in each]
        for each in (made.content, again.content)
    ]
    assert shown[0] == shown[1]
    assert (again.stop_reason, again.model, again.usage.output_tokens) == (made.stop_reason, "m", 6)


async def test_a_websocket_shares_what_is_kept(gateway: Any) -> None:
    ask = asking("On a socket?")
    async with client_of(gateway) as client, being_kept(gateway):
        whole = await client.post(CHAT, json=ask)
        assert whole.headers["x-penstock-cache"] == "miss"
    async with opened(gateway, x_penstock_heads="1") as socket:
        await send(socket, ask)
        head, *frames = await frames_of(socket)
    assert head["headers"]["x-penstock-cache"] == "exact"
    assert "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames[:-1]) == TEXT
    async with opened(gateway, x_penstock_heads="1", x_penstock_cache="off") as socket:
        await send(socket, ask)
        head, *_ = await frames_of(socket)
    assert "x-penstock-cache" not in head["headers"]
    async with opened(gateway, x_penstock_cache="bogus") as socket:
        await send(socket, ask)
        (refusal,) = await frames_of(socket)
    assert "x-penstock-cache" in refusal["error"]["message"]


async def test_what_is_odd_in_json_is_no_fault(gateway: Any) -> None:
    ask = json.dumps(asking("Anything odd?"))
    async with client_of(gateway) as client:
        for odd in ('"\\u0000made by":1', '"x":' + "[" * 500 + "]" * 500, '"x":1e999', '"x":1,"x":2'):
            raw = ask.replace('"m"', f'"m",{odd}')
            answer = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
