"""Each brand of server through the relay: what it gets, what the client gets of it, usage, and faults."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.backends.backend import Order
from gateway.backends.brands import BRANDS
from gateway.backends.faults import BackendFault
from gateway.backends.openai_compatible import OpenAICompatible
from gateway.backends.relay import Exchange
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint, Target
from tests.gateway.backends.relay_support import Rig, read, read_until_fault
from tests.standins.base import (
    CACHED_TOKENS,
    CALLS,
    KEY,
    PIECES,
    PROMPT_TOKENS,
    REASONING,
    TEXT,
    Request,
    StandIn,
    compact,
)
from tests.standins.google import Google
from tests.standins.llamacpp import LlamaCpp, LlamaCppOfOld
from tests.standins.ollama import Ollama
from tests.standins.openai_hosted import ORGANIZATION, OpenAIHosted
from tests.standins.sglang import SGLang
from tests.standins.trtllm import TensorRTLLM
from tests.standins.vllm import VLLM, VLLMOfOld

ALL = [VLLM, VLLMOfOld, SGLang, TensorRTLLM, Ollama, LlamaCpp, LlamaCppOfOld, OpenAIHosted, Google]
TELL_ERRORS_IN_STREAMS = [VLLM, VLLMOfOld, SGLang, LlamaCpp, LlamaCppOfOld, OpenAIHosted, Google]
every_brand = pytest.mark.parametrize("brand", ALL)
BODY = {"messages": [{"role": "user", "content": "Say it."}]}


def ask(rig: Rig, backend: StandIn, fields: dict[str, Any] | None = None, **changes: Any) -> Exchange:
    """An exchange with ``backend``; ``fields`` are the client's, ``changes`` the order's."""
    key = BRANDS[backend.brand].key_headers(KEY)
    rig.use(backend.url, family="openai", brand=backend.brand, headers=key)
    body = raw((fields or BODY) | {"stream": bool(changes.get("streamed", True))})
    return rig.open(
        **{"body": body, "chat": body, "clamp_output": True, "targets": (Target("pool", "theirs"),)} | changes
    )


def raw(fields: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(compact(value)) for name, value in fields.items()}


def sent_events(backend: StandIn) -> list[Any]:
    """What the backend sent last, as its client is to get it: by the name that it asked for, usage apart, calls with
    an index."""
    events = [json.loads(data) for data in backend.sent[-1].events if data != b"[DONE]"]
    if isinstance(backend, Google):
        calls = (call for each in events for call in each["choices"][0]["delta"].get("tool_calls", ()))
        for index, call in enumerate(calls):
            assert "index" not in call
            call["index"] = index
    return [each | {"model": "m"} for each in events]


def usage_of(brand: type[StandIn], completion: int) -> TokenUsage:
    cached = 0 if brand in (Ollama, Google) else CACHED_TOKENS
    reasoning = 3 if brand is OpenAIHosted and completion >= 3 else 0
    return TokenUsage(PROMPT_TOKENS, completion, cached, reasoning_tokens=reasoning)


@every_brand
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning", "running_usage", "keep_alive"])
async def test_a_streams_events_are_the_backends_field_by_field(
    rig: Rig, brand: type[StandIn], scenario: str, wanted: bool
) -> None:
    async with brand(scenario=scenario, needs_key=brand is not TensorRTLLM) as backend:
        exchange = ask(rig, backend, include_usage=wanted)
        found = [json.loads(data) for data in await read(exchange)]
    sent = sent_events(backend)
    told = [each for each in sent if each["choices"]]
    apart = [each for each in sent if not each["choices"]]
    assert len(apart) == (0 if brand in (Google, LlamaCppOfOld) else 1)
    assert found == told + (apart if wanted else [])
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in found if each["choices"])
    assert text == ("" if scenario == "tools" else TEXT)
    usage = [each["usage"] for each in sent if each.get("usage")][-1]
    assert exchange.usage == usage_of(brand, usage["completion_tokens"])
    assert exchange.usage.completion_tokens >= (1 if scenario == "tools" else len(PIECES))


@pytest.mark.parametrize("brand", [VLLM, SGLang, TensorRTLLM, LlamaCpp, OpenAIHosted])
async def test_several_choices_and_tool_deltas_stay_as_they_came(rig: Rig, brand: type[StandIn]) -> None:
    async with brand(scenario="tools") as backend:
        exchange = ask(rig, backend, BODY | {"n": 2})
        found = [json.loads(data) for data in await read(exchange)]
    for index in (0, 1):
        arguments = {place: "" for place in range(len(CALLS))}
        for each in found:
            for choice in each["choices"]:
                for call in (choice["delta"].get("tool_calls") or ()) if choice["index"] == index else ():
                    arguments[call["index"]] += call["function"]["arguments"]
        assert list(arguments.values()) == ["".join(call.arguments) for call in CALLS]
    assert [each["choices"][0]["finish_reason"] for each in found[-2:]] == ["tool_calls"] * 2


@every_brand
@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
async def test_a_whole_answer_is_the_backends_but_for_the_models_name(
    rig: Rig, brand: type[StandIn], scenario: str
) -> None:
    async with brand(scenario=scenario) as backend:
        exchange = ask(rig, backend, streamed=False)
        (found,) = await read(exchange)
    body = backend.sent[-1].body
    assert body is not None
    assert found == body.replace(b'"theirs"', b'"m"')
    assert json.loads(found)["model"] == "m"
    assert exchange.usage == usage_of(brand, json.loads(body)["usage"]["completion_tokens"])
    assert backend.seen[-1].headers["accept"] == "application/json"


@pytest.mark.parametrize("brand", [each for each in ALL if each is not Google])
@pytest.mark.parametrize("streamed", [False, True])
async def test_completions(rig: Rig, brand: type[StandIn], streamed: bool) -> None:
    async with brand() as backend:
        exchange = ask(rig, backend, {"prompt": "Say it."}, api="completions", chat=None, streamed=streamed)
        found = [json.loads(data) for data in await read(exchange)]
    assert backend.seen[-1].path == "/v1/completions"
    assert backend.seen[-1].body["max_tokens"] == 100
    assert "".join(each["choices"][0]["text"] for each in found) == TEXT
    assert exchange.usage == usage_of(brand, len(PIECES))


@pytest.mark.parametrize("brand", [each for each in ALL if each is not TensorRTLLM])
async def test_embeddings(rig: Rig, brand: type[StandIn]) -> None:
    async with brand() as backend:
        changes: dict[str, Any] = {"output_cap": None, "clamp_output": False, "streamed": False}
        exchange = ask(rig, backend, {"input": ["a", "b"]}, api="embeddings", chat=None, **changes)
        (found,) = await read(exchange)
    assert backend.seen[-1].body == {"input": ["a", "b"], "model": "theirs", "stream": False}
    assert [each["index"] for each in json.loads(found)["data"]] == [0, 1]
    assert (exchange.usage.prompt_tokens, exchange.usage.completion_tokens) == (PROMPT_TOKENS, 0)


@every_brand
async def test_a_prompt_that_does_not_fit_is_the_clients_fault_in_the_backends_words(
    rig: Rig, brand: type[StandIn]
) -> None:
    async with brand(scenario="context_length") as backend:
        _, fault = await read_until_fault(ask(rig, backend))
    error = fault.error()
    assert error.status == 400
    told = json.loads(error.encode())["error"]
    assert "4096" in told["message"] or "context length" in told["message"]
    assert not fault.retryable
    assert not fault.unhealthy
    if brand in (VLLM, Ollama, LlamaCpp, OpenAIHosted):
        assert error.encode() == backend.sent[-1].body


@every_brand
async def test_a_backend_that_refuses_our_key_is_at_fault_and_nobodys_key_is_shown(
    rig: Rig, brand: type[StandIn]
) -> None:
    async with brand(scenario="unauthorized") as backend:
        _, fault = await read_until_fault(ask(rig, backend))
    error = fault.error()
    assert (error.status, error.body.code, error.body.type) == (502, "backend_unauthorized", "server_error")
    assert fault.retryable
    assert fault.unhealthy
    assert b"sk-" not in error.encode()
    assert KEY.encode() not in error.encode()


@every_brand
async def test_a_model_that_the_backend_does_not_have_is_not_the_clients_fault(rig: Rig, brand: type[StandIn]) -> None:
    async with brand(scenario="no_model") as backend:
        _, fault = await read_until_fault(ask(rig, backend))
    assert (fault.error().status, fault.code) == (502, "backend_not_found")
    assert fault.retryable
    assert b"other" not in fault.error().encode()


@every_brand
async def test_a_busy_backend_says_when_to_come_again(rig: Rig, brand: type[StandIn]) -> None:
    async with brand(scenario="rate_limited") as backend:
        _, fault = await read_until_fault(ask(rig, backend))
    assert fault.error().status == backend.sent[-1].status
    assert fault.error().status in (429, 503)
    assert fault.retryable
    assert fault.unhealthy == (fault.status == 503)
    if brand is OpenAIHosted:
        assert fault.retry_after_s == 0.35
        assert fault.error().headers == {"retry-after": "1"}
        assert ORGANIZATION.encode() not in fault.error().encode()
        assert b"Rate limit reached" in fault.error().encode()
    if brand is VLLM:
        assert (fault.retry_after_s, fault.error().headers) == (2.0, {"retry-after": "2"})


async def test_no_credit_left_is_no_rate_limit(rig: Rig) -> None:
    async with OpenAIHosted(scenario="no_credit") as backend:
        _, fault = await read_until_fault(ask(rig, backend))
    assert (fault.error().status, fault.code, fault.unhealthy) == (502, "backend_unauthorized", True)
    assert b"billing" not in fault.error().encode()


@every_brand
@pytest.mark.parametrize(("scenario", "status"), [("failing", 502), ("loading", 503)])
async def test_a_failing_backend_is_left_for_another(
    rig: Rig, brand: type[StandIn], scenario: str, status: int
) -> None:
    async with brand(scenario=scenario) as bad, brand() as good:
        ask(rig, bad)
        rig.use(bad.url, good.url, in_turn=True, family="openai", brand=brand.brand)
        body = raw(BODY | {"stream": True})
        exchange = rig.open(body=body, chat=body, clamp_output=True)
        found = await read(exchange)
        assert exchange.attempts == 2
        assert len(found) >= 2
        _, fault = await read_until_fault(ask(rig, bad))
    assert fault.error().status == status
    assert fault.unhealthy


@pytest.mark.parametrize("brand", TELL_ERRORS_IN_STREAMS)
async def test_an_error_in_a_stream_ends_it_in_the_backends_words(rig: Rig, brand: type[StandIn]) -> None:
    async with brand(scenario="error_in_stream") as backend:
        exchange = ask(rig, backend)
        found, fault = await read_until_fault(exchange)
    assert len(found) == 3
    assert not exchange.complete
    told = json.loads(fault.error().encode())["error"]
    assert told["message"].encode() in backend.sent[-1].pieces[3]
    assert exchange.usage.completion_tokens >= 1


@pytest.mark.parametrize("brand", TELL_ERRORS_IN_STREAMS)
async def test_an_error_before_any_content_has_a_status(rig: Rig, brand: type[StandIn]) -> None:
    expected = {VLLM: 500, VLLMOfOld: 400, SGLang: 400, LlamaCpp: 500, LlamaCppOfOld: 500, OpenAIHosted: 502}
    async with brand(scenario="error_first") as backend:
        found, fault = await read_until_fault(ask(rig, backend))
    assert found == []
    assert fault.error().status == expected.get(brand, 503)


@every_brand
async def test_a_stream_that_was_cut_is_no_whole_one(rig: Rig, brand: type[StandIn]) -> None:
    async with brand(scenario="cut") as backend:
        exchange = ask(rig, backend)
        found, fault = await read_until_fault(exchange)
    assert len(found) == 3
    assert fault.code == "backend_disconnected"
    assert not exchange.complete


async def test_faults_that_ollama_and_tensorrt_llm_do_not_tell_are_cuts(rig: Rig) -> None:
    for brand in (Ollama, TensorRTLLM):
        async with brand(scenario="error_in_stream") as backend:
            _, fault = await read_until_fault(ask(rig, backend))
        assert fault.code == "backend_disconnected"


async def test_nothing_of_the_client_but_its_fields_is_sent_and_all_of_these(rig: Rig) -> None:
    body = BODY | {
        "top_k": 7,
        "guided_json": {"type": "object"},
        "stream_options": {"include_usage": False, "continuous_usage_stats": True},
        "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklGRg=="}}]}],
    }
    async with VLLM(needs_key=True) as backend:
        await read(ask(rig, backend, body))
    (request,) = backend.seen
    assert request.path == "/v1/chat/completions"
    assert request.body == body | {
        "model": "theirs",
        "stream": True,
        "max_tokens": 100,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert set(request.headers) == {
        *("host", "content-type", "content-length", "accept", "accept-encoding"),
        *("authorization", "x-request-id"),
    }
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["x-request-id"] == "0199"


def sent_caps(brand: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    fields = raw(body)
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "targets": (),
        "context_length": 1000,
        "body": fields,
        "chat": fields,
        "streamed": False,
        "include_usage": False,
        "output_cap": 100,
        "clamp_output": False,
        "salt": "s",
        "tenant": "t",
        "prompt_bytes": 10,
    }
    endpoint = Endpoint("e", "pool", "http://e", "m", 1000, family="openai", brand=brand)
    outgoing = OpenAICompatible().outgoing(Order(**(values | changes)), endpoint, "theirs")
    decoded = json.loads(outgoing.body)
    decoded.pop("model")
    return dict(decoded)


@pytest.mark.parametrize(
    ("brand", "given", "sent"),
    [
        ("openai", {"max_tokens": 100}, {"max_completion_tokens": 100}),
        ("openai", {"max_completion_tokens": 100}, {"max_completion_tokens": 100}),
        ("ollama", {"max_completion_tokens": 100}, {"max_tokens": 100}),
        ("generic", {"max_completion_tokens": 100}, {"max_tokens": 100}),
        ("llamacpp", {"max_completion_tokens": 100}, {"max_tokens": 100}),
        ("generic", {"max_tokens": 1e2}, {"max_tokens": 1e2}),
        ("vllm", {"max_completion_tokens": 100}, {"max_completion_tokens": 100}),
        ("google", {"max_tokens": 100}, {"max_tokens": 100}),
        ("a brand unknown to us", {}, {"max_tokens": 100}),
    ],
)
def test_the_cap_stands_where_the_brand_obeys_it(brand: str, given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert sent_caps(brand, given, clamp_output=not given) == sent


def test_completions_are_capped_by_the_only_field_that_they_know() -> None:
    assert sent_caps("openai", {}, clamp_output=True, api="completions", chat=None) == {"max_tokens": 100}


def test_null_caps_are_none_that_the_client_gave() -> None:
    assert sent_caps("openai", {"max_tokens": None}, clamp_output=True) == {"max_completion_tokens": 100}


async def test_a_whole_answer_to_who_asked_for_a_stream_is_told_as_one(rig: Rig, upstream: Any) -> None:
    request = {"model": "theirs", "messages": []}
    whole = VLLM().whole_chat(_request(request), "tools")

    async def answer(c: Any) -> None:
        await c.status(200, compact(whole))

    server = await upstream(answer)
    rig.use(server.url, family="openai", brand="generic")
    exchange = rig.open(include_usage=True)
    first, usage = [json.loads(data) for data in await read(exchange)]
    assert first["object"] == usage["object"] == "chat.completion.chunk"
    assert first["model"] == "m"
    assert [call["index"] for call in first["choices"][0]["delta"]["tool_calls"]] == [0, 1]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert exchange.usage == usage_of(VLLM, whole["usage"]["completion_tokens"])


@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
async def test_a_stream_to_who_asked_for_a_whole_answer_is_put_together(rig: Rig, upstream: Any, scenario: str) -> None:
    backend = VLLM()
    request = _request({"model": "theirs", "messages": [], "n": 2, "stream_options": {"include_usage": True}})

    async def answer(c: Any) -> None:
        await c.begin()
        for piece in backend.chat_stream(request, scenario):
            await c.send_piece(piece)
        await c.send(b"0\r\n\r\n")

    server = await upstream(answer)
    rig.use(server.url, family="openai", brand="generic")
    exchange = rig.open(streamed=False)
    (found,) = [json.loads(data) for data in await read(exchange)]
    expected = backend.whole_chat(request, scenario)
    assert found["object"] == "chat.completion"
    assert found["model"] == "m"
    for got, choice in zip(found["choices"], expected["choices"], strict=True):
        message = choice["message"] | ({"content": ""} if scenario == "tools" else {})
        assert got["message"] == message
        assert got["finish_reason"] == choice["finish_reason"]
    assert found["usage"] == expected["usage"]
    assert exchange.usage == usage_of(VLLM, expected["usage"]["completion_tokens"])


def _request(body: dict[str, Any]) -> Request:
    return Request("POST", "/v1/chat/completions", {}, compact(body))


async def test_an_answer_of_neither_kind_is_a_fault(rig: Rig, upstream: Any) -> None:
    async def page(c: Any) -> None:
        await c.status(200, b"<html>", media_type="text/html")

    rig.use((await upstream(page)).url, family="openai", brand="generic")
    _, fault = await read_until_fault(rig.open())
    assert (fault.code, fault.error().status) == ("backend_protocol_error", 502)


async def test_a_secret_that_a_backend_repeats_is_masked(rig: Rig, upstream: Any) -> None:
    async def repeats(c: Any) -> None:
        told = {"error": {"message": f"bad field; you sent {c.headers['authorization']}", "type": "bad", "code": "x"}}
        await c.status(400, compact(told))

    async def repeats_in_a_stream(c: Any) -> None:
        await c.begin()
        await c.event(compact({"error": f"bad field; you sent {c.headers['authorization']}"}))

    for script in (repeats, repeats_in_a_stream):
        server = await upstream(script)
        rig.use(server.url, family="openai", brand="vllm", headers={"authorization": "Bearer hidden-secret"})
        _, fault = await read_until_fault(rig.open())
        assert "bad field; you sent Bearer ***" in json.loads(fault.error().encode())["error"]["message"]


@pytest.mark.parametrize("brand", [VLLM, SGLang, TensorRTLLM, Ollama, LlamaCpp, OpenAIHosted, Google])
async def test_a_probe_costs_nothing(brand: type[StandIn]) -> None:
    async with brand() as backend, Transport() as transport:
        headers = {"authorization": f"Bearer {KEY}"}
        endpoint = Endpoint("e", "pool", backend.url, "m", 1000, family="openai", brand=brand.brand, headers=headers)
        url, sent = OpenAICompatible().probe(endpoint)
        reply = await transport.get(url, headers=sent, connect_s=2.0)
        reply.close()
    assert reply.status == 200
    assert backend.seen[0].method == "GET"
    assert backend.seen[0].headers["authorization"] == f"Bearer {KEY}"


async def test_reasoning_arrives_where_each_brand_puts_it(rig: Rig) -> None:
    for brand, field in ((VLLM, "reasoning"), (SGLang, "reasoning_content"), (Ollama, "reasoning")):
        async with brand(scenario="reasoning") as backend:
            found = [json.loads(data) for data in await read(ask(rig, backend))]
        assert "".join(each["choices"][0]["delta"].get(field) or "" for each in found) == "".join(REASONING)


def test_every_brand_names_a_family_and_a_way_to_bear_its_key() -> None:
    assert {
        "openai",
        "vllm",
        "sglang",
        "trtllm",
        "ollama",
        "llamacpp",
        "google",
        "anthropic",
        "penstock",
        "generic",
    } == {*BRANDS}
    assert BRANDS["anthropic"].key_headers("k") == {"x-api-key": "k"}
    assert BRANDS["google"].key_headers("k") == {"authorization": "Bearer k"}
    for brand in BRANDS.values():
        assert brand.cap_field in brand.cap_fields


def test_a_fault_tells_nothing_of_its_secrets() -> None:
    endpoint = Endpoint("e", "pool", "http://e", "m", 1000, headers={"authorization": "Bearer hidden-secret"})
    body = compact({"detail": "hidden-secret"})
    fault = OpenAICompatible().refusal(endpoint, 422, body, None)
    assert isinstance(fault, BackendFault)
    assert (
        fault.error().encode() == b'{"error":{"message":"***","type":"invalid_request_error","param":null,"code":null}}'
    )
