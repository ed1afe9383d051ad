"""Anthropic's API behind the relay: what is sent, what comes back, what is tried elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from gateway.ask import Body
from gateway.backends.anthropic import Anthropic as Adapter
from gateway.backends.backend import Order
from gateway.backends.faults import BackendError, BackendFault
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint, Target
from tests.gateway.backends.relay_support import Rig, read, read_until_fault
from tests.standins import base
from tests.standins.anthropic import Anthropic
from worker.protocol.errors import ApiError

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


class FixedClock:
    def now(self) -> datetime:
        return datetime(2026, 11, 30, tzinfo=UTC)

    def monotonic(self) -> float:
        return 0.0


def body(fields: dict[str, Any]) -> Body:
    return msgspec.json.decode(json.dumps(fields), type=Body)


def endpoint(url: str = "http://a", id: str = "a0", **more: Any) -> Endpoint:
    values: dict[str, Any] = {
        "family": "anthropic",
        "brand": "anthropic",
        "headers": {"x-api-key": base.KEY},
        "sends_model": "claude-sonnet-4-6",
    }
    return Endpoint(id, "pool", url, "m", 1000, **(values | more))


def order(api: str = "chat_completions", fields: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What makes an order for ``fields``."""
    asked = QUESTION | (fields or {}) | ({"stream": True} if more.get("streamed", True) else {})
    chat = body(asked) if api != "messages" else None
    return {"api": api, "body": body(asked), "chat": chat, "streamed": True} | more


def as_order(values: dict[str, Any]) -> Order:
    ready: dict[str, Any] = {
        "request_id": "0199",
        "model": "m",
        "targets": (Target("pool", "m"),),
        "context_length": 1000,
        "include_usage": False,
        "output_cap": 100,
        "clamp_output": False,
        "salt": "s",
        "tenant": "t",
        "prompt_bytes": 100,
    }
    return Order(**(ready | values))


@pytest.fixture
async def claude(rig: Rig) -> AsyncIterator[Anthropic]:
    async with Anthropic(needs_key=True) as standin:
        rig.relay.backends = {**rig.relay.backends, "anthropic": Adapter(FixedClock())}
        rig.alive[:] = [endpoint(standin.url)]
        yield standin


# What is sent.


async def test_a_messages_request_is_passed_on_as_it_is(rig: Rig, claude: Anthropic) -> None:
    raw = b'{ "model":"m", "messages" : [{"role":"user","content":"H\\u0069"}], "stream": true, "top_k": 5.0 }'
    fields = msgspec.json.decode(raw, type=Body)
    await read(rig.open(**order("messages", body=fields, output_cap=77)))
    [request] = claude.seen
    assert request.raw == (
        b'{"model":"claude-sonnet-4-6","messages":[{"role":"user","content":"H\\u0069"}],"stream":true,'
        b'"top_k":5.0,"max_tokens":77}'
    )
    assert request.path == "/v1/messages"
    assert request.headers["x-api-key"] == base.KEY
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-request-id"] == "0199"
    assert "authorization" not in request.headers


def test_a_backends_headers_may_name_another_version_and_betas() -> None:
    more = {"headers": {"x-api-key": "k", "anthropic-version": "2099-01-01", "anthropic-beta": "b-1"}}
    sent = Adapter().outgoing(as_order(order()), endpoint(**more), "claude-x")
    assert sent.headers["anthropic-version"] == "2099-01-01"
    assert sent.headers["anthropic-beta"] == "b-1"
    assert "k" not in repr(sent)


async def test_a_chat_is_translated(rig: Rig, claude: Anthropic) -> None:
    await read(rig.open(**order(fields={"stop": "x", "max_tokens": 5, "seed": 7})))
    assert claude.seen[0].body == {
        "model": "claude-sonnet-4-6",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stop_sequences": ["x"],
        "stream": True,
    }


def test_the_probe_asks_for_one_model() -> None:
    url, headers = Adapter().probe(endpoint("http://a"))
    assert url == "http://a/v1/models?limit=1"
    assert headers == {"anthropic-version": "2023-06-01", "x-api-key": base.KEY}


# What comes back.


@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning", "keep_alive"])
async def test_events_are_those_of_the_backend_but_for_the_models_name(
    rig: Rig, claude: Anthropic, scenario: str
) -> None:
    claude.scenario = scenario
    exchange = rig.open(**order("messages"))
    found = await read(exchange)
    sent = claude.sent[0].events
    assert found == [sent[0].replace(b'"claude-sonnet-4-6"', b'"m"'), *sent[1:]]
    for event in found:
        if event != b'{"type":"ping"}':
            EVENT.validate_json(event, strict=True)
    assert exchange.usage == TokenUsage(9, 5 if scenario in ("text", "keep_alive") else 10, 4)
    assert rig.checkpoints[-1] == (exchange.usage, "a0")


@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
async def test_a_whole_message_is_the_backends_but_for_the_models_name(
    rig: Rig, claude: Anthropic, scenario: str
) -> None:
    claude.scenario = scenario
    exchange = rig.open(**order("messages", streamed=False))
    [found] = await read(exchange)
    assert claude.sent[0].body is not None
    assert found == claude.sent[0].body.replace(b'"claude-sonnet-4-6"', b'"m"')
    Message.model_validate_json(found, strict=True)
    assert exchange.usage.prompt_tokens == 9


@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
async def test_a_stream_as_chunks(rig: Rig, claude: Anthropic, scenario: str) -> None:
    claude.scenario = scenario
    found = await read(rig.open(**order(include_usage=True)))
    chunks = [ChatCompletionChunk.model_validate_json(chunk, strict=True) for chunk in found]
    assert {chunk.model for chunk in chunks} == {"m"}
    assert {chunk.created for chunk in chunks} == {1_795_996_800}
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    if scenario == "tools":
        arguments = [call for delta in deltas for call in delta.tool_calls or []]
        for index, call in enumerate(base.CALLS):
            pieces = [each.function.arguments or "" for each in arguments if each.index == index and each.function]
            assert "".join(pieces) == "".join(call.arguments)
    else:
        assert "".join(delta.content or "" for delta in deltas) == base.TEXT
    assert chunks[-2].choices[0].finish_reason == ("tool_calls" if scenario == "tools" else "stop")


async def test_a_whole_answer_as_a_completion(rig: Rig, claude: Anthropic) -> None:
    claude.scenario = "tools"
    [found] = await read(rig.open(**order(streamed=False)))
    completion = ChatCompletion.model_validate_json(found, strict=True)
    assert completion.model == "m"
    calls = completion.choices[0].message.tool_calls or []
    assert [call.id for call in calls] == [call.id for call in base.CALLS]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


class _Counting:
    """Into the words of an API that tells each chunk's size."""

    def event(self, data: bytes) -> list[bytes]:
        return [b"%d" % len(data)]

    def end(self) -> list[bytes]:
        return [b"end"]

    def whole(self, body: bytes) -> bytes:
        return b"%d" % len(body)


async def test_what_comes_back_goes_on_into_another_apis_words(rig: Rig, claude: Anthropic) -> None:
    chunks = await read(rig.open(**order()))
    found = await read(rig.open(**order("responses", from_chat=_Counting)))
    assert found == [b"%d" % len(chunk) for chunk in chunks] + [b"end"]
    [completion] = await read(rig.open(**order(streamed=False)))
    assert await read(rig.open(**order("responses", streamed=False, from_chat=_Counting))) == [b"%d" % len(completion)]


# What goes wrong.


@pytest.mark.parametrize(
    ("scenario", "status", "code", "retryable"),
    [
        ("context_length", 400, "invalid_request_error", False),
        ("too_large", 413, "request_too_large", False),
        ("rate_limited", 429, "rate_limit_error", True),
        ("failing", 500, "api_error", True),
        ("loading", 503, "overloaded_error", True),
        ("error_first", 503, "overloaded_error", True),
    ],
)
async def test_errors_that_the_client_may_read(
    rig: Rig, claude: Anthropic, scenario: str, status: int, code: str, retryable: bool
) -> None:
    claude.scenario = scenario
    exchange = rig.open(**order("messages"))
    found, fault = await read_until_fault(exchange)
    assert found == []
    assert isinstance(fault, BackendError)
    assert (fault.status, fault.code, fault.retryable, fault.family) == (status, code, retryable, "anthropic")
    sent = claude.sent[0]
    assert fault.body == (sent.body or sent.events[-1])
    told = json.loads(fault.error().encode())["error"]
    assert told["message"] == json.loads(fault.body)["error"]["message"]
    assert exchange.failed_attempts == [f"a0 {code}"]


async def test_what_openais_clients_go_by(rig: Rig, claude: Anthropic) -> None:
    claude.scenario = "context_length"
    _, fault = await read_until_fault(rig.open(**order()))
    assert json.loads(fault.error().encode())["error"]["code"] == "context_length_exceeded"
    claude.scenario = "rate_limited"
    _, fault = await read_until_fault(rig.open(**order()))
    assert json.loads(fault.error().encode())["error"]["type"] == "rate_limit_error"
    assert fault.error().headers["retry-after"] == "7"
    assert fault.retry_after_s == 7


@pytest.mark.parametrize(
    ("scenario", "code"),
    [
        ("unauthorized", "backend_unauthorized"),
        ("no_permission", "backend_unauthorized"),
        ("no_credit", "backend_unauthorized"),
        ("no_model", "backend_not_found"),
    ],
)
async def test_what_is_the_operators_to_mend(rig: Rig, claude: Anthropic, scenario: str, code: str) -> None:
    claude.scenario = scenario
    _, fault = await read_until_fault(rig.open(**order()))
    assert not isinstance(fault, BackendError)
    assert (fault.status, fault.code) == (502, code)
    said = json.loads((claude.sent[0].body or b"").decode())["error"]["message"]
    assert said not in fault.message


@pytest.mark.parametrize("api", ["messages", "chat_completions"])
async def test_an_overload_that_comes_before_any_content_is_tried_elsewhere(
    rig: Rig, claude: Anthropic, api: str
) -> None:
    claude.scenario = "error_first"
    async with Anthropic(scenario="text") as other:
        rig.alive[:] = [endpoint(claude.url), endpoint(other.url, "a1", priority=1)]
        exchange = rig.open(**order(api))
        found = await read(exchange)
    assert found
    assert exchange.failed_attempts == ["a0 overloaded_error"]
    assert exchange.backend_id == "a1"
    assert exchange.wasted == [TokenUsage(9, 1, 4)]
    assert exchange.usage == TokenUsage(9, 5, 4)


@pytest.mark.parametrize(
    ("scenario", "code"), [("error_in_stream", "overloaded_error"), ("cut", "backend_disconnected")]
)
@pytest.mark.parametrize("api", ["messages", "chat_completions"])
async def test_what_breaks_off_in_the_middle_is_told_and_paid_by_an_estimate(
    rig: Rig, claude: Anthropic, scenario: str, code: str, api: str
) -> None:
    claude.scenario = scenario
    exchange = rig.open(**order(api))
    found, fault = await read_until_fault(exchange)
    assert found
    assert not any(b"message_stop" in event or b'"finish_reason":"' in event for event in found)
    assert fault.code == code
    assert not exchange.complete
    assert exchange.usage.prompt_tokens == 9
    assert 1 <= exchange.usage.completion_tokens <= 5


async def test_what_cannot_be_asked_is_asked_of_another_family(rig: Rig, claude: Anthropic, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("x", 1)
        await c.done()

    server = await upstream(answer)
    rig.alive[:] = [endpoint(claude.url), Endpoint("w0", "pool", server.url, "m", 1000, priority=1)]
    exchange = rig.open(**order(fields={"n": 2}))
    await read(exchange)
    assert (exchange.backend_id, exchange.attempts, exchange.failed_attempts) == ("w0", 1, [])
    assert claude.seen == []


async def test_what_nobody_can_be_asked_is_refused_by_its_field(rig: Rig, claude: Anthropic) -> None:
    exchange = rig.open(**order(fields={"logprobs": True}))
    with pytest.raises(ApiError) as caught:
        await read(exchange)
    assert (caught.value.status, caught.value.body.param) == (400, "logprobs")
    assert (exchange.attempts, exchange.failed_attempts, exchange.usage) == (0, [], TokenUsage())
    assert rig.balancer.choose((Target("pool", "m"),), "chat_completions", context_length=1000), (
        "the backend is not to blame"
    )


def test_what_is_no_answer_at_all() -> None:
    adapter = Adapter()
    for streamed, media_type in ((True, "application/json"), (False, "text/event-stream"), (False, "text/html")):
        with pytest.raises(BackendFault, match="something that is not"):
            adapter.reader(as_order(order(streamed=streamed)), endpoint(), media_type)
    with pytest.raises(ApiError):
        adapter.outgoing(as_order(order("responses", chat=None)), endpoint(), "claude-x")
