"""Streams as backends and doors send them come to what the same backend answers as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis import Api
from gateway.ask import Translator
from gateway.assembly import Assembler, assembler, describe
from gateway.backends.tool_calls import StreamedCalls
from gateway.billing.usage import TokenUsage
from gateway.translation.messages_from_chat import MessagesFromChat
from gateway.translation.responses_answer import Frame, ResponsesAnswer
from tests.standins.base import CALLS, REASONING, TEXT, Request, compact
from tests.standins.google import Google
from tests.standins.llamacpp import LlamaCpp
from tests.standins.ollama import Ollama
from tests.standins.openai_hosted import OpenAIHosted
from tests.standins.openai_words import OpenAIWords
from tests.standins.sglang import SGLang
from tests.standins.trtllm import TensorRTLLM
from tests.standins.vllm import VLLM

USAGE = TokenUsage(9, 5, 4)
BRANDS: list[type[OpenAIWords]] = [VLLM, SGLang, TensorRTLLM, Ollama, LlamaCpp, OpenAIHosted, Google]
REQUEST = Request("POST", "/v1/chat/completions", {}, compact({"model": "m", "messages": []}))
TWICE = Request("POST", "/v1/chat/completions", {}, compact({"model": "m", "messages": [], "n": 2}))


def chunks_of(brand: type[OpenAIWords], request: Request, scenario: str) -> list[bytes]:
    """As a door of chat completions sends them on."""
    calls = StreamedCalls()
    pieces = b"".join(brand().chat_stream(request, scenario)).replace(b"\r\n", b"\n").split(b"\n\n")
    found = [line[5:].strip() for piece in pieces for line in piece.splitlines() if line.startswith(b"data:")]
    return [calls.corrected(data) for data in found if data != b"[DONE]"]


def put_together(found: Assembler, events: list[Any], usage: TokenUsage | None = None) -> Any:
    for event in events:
        found.feed(event if isinstance(event, bytes) else json.dumps(event).encode())
    whole = found.whole(usage)
    return None if whole is None else json.loads(whole)


@pytest.mark.parametrize("brand", BRANDS)
@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
def test_chat_chunks_of_every_brand(brand: type[OpenAIWords], scenario: str) -> None:
    request = REQUEST if brand in (Ollama, LlamaCpp) else TWICE
    whole = put_together(assembler("chat_completions", limit=10**6), chunks_of(brand, request, scenario), USAGE)
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["prompt_tokens"] == USAGE.prompt_tokens
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    for choice in whole["choices"]:
        message = choice["message"]
        assert message["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "tool_calls")
        if scenario == "tools":
            told = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            assert told == [(call.name, "".join(call.arguments)) for call in CALLS]
            assert all(
                call["id"] and call["type"] == "function" and "index" not in call for call in message["tool_calls"]
            )
        else:
            assert message["content"] == TEXT
        if scenario == "reasoning" and brand not in (OpenAIHosted, Google):  # these keep their thoughts
            assert "".join(REASONING) in message.values()
    facts = describe("chat_completions", json.dumps(whole).encode())
    assert facts.complete
    assert facts.has_tool_calls is (scenario == "tools")
    assert not facts.refused
    assert not facts.truncated


@pytest.mark.parametrize("scenario", ["text", "tools", "reasoning"])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_what_other_doors_make_of_chunks(api: Api, scenario: str) -> None:
    def translator() -> Translator:
        return ResponsesAnswer(Frame("a" * 32, "m", 1, {}), lambda: 2) if api == "responses" else MessagesFromChat("m")

    streamed = translator()
    events = [event for chunk in chunks_of(VLLM, REQUEST, scenario) for event in streamed.event(chunk)] + streamed.end()
    chat = put_together(assembler("chat_completions", limit=10**6), chunks_of(VLLM, REQUEST, scenario), None)
    expected = json.loads(translator().whole(json.dumps(chat).encode()))
    assert put_together(assembler(api, limit=10**6), events) == expected
    if api == "responses":
        # An answer that breaks off before its last event.
        broken = put_together(assembler(api, limit=10**6), events[:-1], USAGE)
        assert broken["output"] == expected["output"]
        assert broken["status"] == "in_progress"
        assert broken["usage"]["output_tokens"] == USAGE.completion_tokens


def chunk(delta: dict[str, Any], *, index: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]} | more


def test_pieces_of_several_calls_and_choices_in_turn() -> None:
    def call(index: int, **said: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **said}]}

    events = [
        chunk({"role": "assistant", "content": None, "tool_calls": []}),
        chunk(call(1, id="b", type="function", function={"name": "g", "arguments": ""})),
        chunk({"role": "assistant", "content": "x"}, index=1),
        chunk(call(0, id="a", type="function", function={"name": "f", "arguments": "{"})),
        chunk(call(1, function={"arguments": "[]"}), obfuscation="abc"),
        chunk({"content": "y", "reasoning_details": [{"index": 0, "type": "t", "text": "1"}]}, index=1),
        chunk(call(0, function={"arguments": "}"})),
        chunk(
            {"content": "z", "reasoning_details": [{"index": 0, "type": "t", "text": "2"}]}, index=1, finish="length"
        ),
        {"error": {"message": "broken off"}},
    ]
    first, second = put_together(assembler("chat_completions", limit=10**6), events)["choices"]
    assert first["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "[]"}},
    ]
    assert first["finish_reason"] is None
    assert second["message"]["content"] == "xyz"
    assert second["message"]["reasoning_details"] == [{"index": 0, "type": "t", "text": "12"}]
    assert second["finish_reason"] == "length"


def test_the_usage_that_the_stream_told_counts_before_what_was_metered() -> None:
    told = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    events = [chunk({"content": "x"}, usage=None), chunk({}, usage=told, choices=[])]
    assert put_together(assembler("chat_completions", limit=9), events, USAGE)["usage"] == told
    assert put_together(assembler("chat_completions", limit=99), events[:1], USAGE)["usage"]["completion_tokens"] == 5
    assert put_together(assembler("chat_completions", limit=99), events[:1])["usage"] is None


def test_a_message_broken_off_tells_the_metered_usage_and_the_input_as_far_as_it_came() -> None:
    start = {"id": "msg_1", "content": [], "usage": {"input_tokens": 9, "output_tokens": 1, "service_tier": "standard"}}
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    delta = {"type": "input_json_delta", "partial_json": '{"city": "Zü'}
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
    ]
    whole = put_together(assembler("messages", limit=10**6), events, USAGE)
    assert whole["content"] == [block | {"input": {"INVALID_JSON": '{"city": "Zü'}}]
    assert whole["stop_reason"] is None
    assert (whole["usage"]["output_tokens"], whole["usage"]["service_tier"]) == (5, "standard")


def test_a_limit_counts_what_is_kept_not_how_it_came() -> None:
    events = [chunk({"content": "Zürich"}) for _ in range(100)]
    fits = assembler("chat_completions", limit=800)
    assert put_together(fits, events)["choices"][0]["message"]["content"] == "Zürich" * 100
    assert not fits.over
    cut = assembler("chat_completions", limit=650)
    ended = put_together(cut, [*events, chunk({}, finish="stop")])
    content = ended["choices"][0]["message"]["content"]
    assert cut.over
    assert ("Zürich" * 100).startswith(content)
    assert 640 <= len(content.encode()) <= 650
    assert ended["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("api", "answer", "expected"),
    [
        ("chat_completions", {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}, "truncated"),
        (
            "chat_completions",
            {"choices": [{"message": {"refusal": "no"}, "finish_reason": "stop"}]},
            "complete refused",
        ),
        ("chat_completions", {"choices": [{"message": {}, "finish_reason": "content_filter"}]}, "refused"),
        ("chat_completions", {"choices": [{"message": {"content": "a"}, "finish_reason": None}]}, ""),
        ("chat_completions", {"choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}, "truncated"),
        ("chat_completions", {"choices": []}, ""),
        ("completions", {"choices": [{"text": "a", "finish_reason": "stop"}]}, "complete"),
        ("messages", {"content": [], "stop_reason": "max_tokens"}, "truncated"),
        ("messages", {"content": [], "stop_reason": "refusal"}, "refused"),
        ("messages", {"content": [], "stop_reason": "pause_turn"}, ""),
        ("messages", {"content": [{"type": "server_tool_use"}], "stop_reason": "end_turn"}, "complete has_tool_calls"),
        ("responses", {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "truncated"),
        ("responses", {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "refused"),
        ("responses", {"status": "failed", "output": []}, ""),
        ("responses", {"status": "completed", "output": [{"type": "custom_tool_call"}]}, "complete has_tool_calls"),
        (
            "responses",
            {"status": "completed", "output": [{"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "complete refused",
        ),
        ("embeddings", {"object": "list", "data": []}, "complete"),
    ],
)
def test_what_is_to_be_known_of_an_answer(api: Api, answer: dict[str, Any], expected: str) -> None:
    facts = describe(api, json.dumps(answer).encode())
    names = ("complete", "truncated", "refused", "has_tool_calls")
    assert [name for name in names if getattr(facts, name)] == expected.split()
