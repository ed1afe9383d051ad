"""Anthropic's answers told as chat completions: whole, streamed, and both alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.ask import Untranslatable
from gateway.translation.chain import Chain
from gateway.translation.chat_answer import ChatAnswer
from tests.standins.anthropic_words import BARE_TOOL, REDACTED, TEXT, THINKING, TOOL, encoded, events_of, message

TOLD = {
    "prompt_tokens": 119,
    "completion_tokens": 30,
    "total_tokens": 149,
    "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 7},
    "completion_tokens_details": {"reasoning_tokens": 9},
}
CALL = {
    "id": "toolu_01A",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Zürich","days":1.0}'},
}


def translator(**more: Any) -> ChatAnswer:
    return ChatAnswer("m", 1_764_000_000, **more)


def whole(answer: dict[str, Any], **more: Any) -> dict[str, Any]:
    completion = json.loads(translator(**more).whole(encoded(answer)))
    ChatCompletion.model_validate(completion, strict=True)
    assert isinstance(completion, dict)
    return completion


def chunks(answer: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    to_chat = translator(**({"include_usage": True} | more))
    found = [chunk for event in events_of(answer) for chunk in to_chat.event(encoded(event))] + to_chat.end()
    for chunk in found:
        ChatCompletionChunk.model_validate_json(chunk, strict=True)
    return [json.loads(chunk) for chunk in found]


def put_together(streamed: list[dict[str, Any]]) -> dict[str, Any]:
    """As OpenAI's own SDK does it."""
    state = ChatCompletionStreamState()
    for chunk in streamed:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.current_completion_snapshot.model_dump(exclude_none=True)


def test_a_whole_answer() -> None:
    assert whole(message(THINKING, TEXT, TOOL, stop_reason="tool_use")) == {
        "id": "msg_01XFDUDYJgAACzvnptvVoYEL",
        "object": "chat.completion",
        "created": 1_764_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": TEXT["text"],
                    "refusal": None,
                    "reasoning_content": THINKING["thinking"],
                    "tool_calls": [CALL],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": TOLD,
    }


def test_a_stream() -> None:
    first, *others = chunks(message({"type": "text", "text": "Hello you"}))
    head = {
        "id": "msg_01XFDUDYJgAACzvnptvVoYEL",
        "object": "chat.completion.chunk",
        "created": 1_764_000_000,
        "model": "m",
    }
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first == head | {"choices": [choice | {"delta": {"role": "assistant", "content": ""}}]}
    assert others == [
        head | {"choices": [choice | {"delta": {"content": "Hello"}}]},
        head | {"choices": [choice | {"delta": {"content": " you"}}]},
        head | {"choices": [choice | {"delta": {}, "finish_reason": "stop"}]},
        head | {"choices": [], "usage": TOLD},
    ]
    assert all("usage" not in chunk for chunk in chunks(message(TEXT), include_usage=False))


def test_calls_are_counted_and_an_empty_input_is_an_empty_object() -> None:
    streamed = chunks(message(TEXT, TOOL, BARE_TOOL, stop_reason="tool_use"))
    calls = [
        call for chunk in streamed for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])
    ]
    assert calls[0] == {
        "index": 0,
        "id": "toolu_01A",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == (
        '{"city": "Zürich", "days": 1.0}'
    )
    assert [call["function"] for call in calls if call["index"] == 1] == [
        {"name": "now", "arguments": ""},
        {"arguments": "{}"},
    ]


def test_an_input_that_comes_with_the_beginning_of_its_block() -> None:
    to_chat = translator()
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    found = to_chat.event(encoded({"type": "content_block_start", "index": 0, "content_block": block}))
    found += to_chat.event(encoded({"type": "content_block_stop", "index": 0}))
    last = json.loads(found[-1])["choices"][0]["delta"]["tool_calls"][0]
    assert last == {"index": 0, "function": {"arguments": '{"a":1}'}}


def test_a_client_that_knows_no_tools_gets_a_function_call() -> None:
    answer = message(BARE_TOOL, TOOL, stop_reason="tool_use")
    choice = whole(answer, legacy=True)["choices"][0]
    assert choice["message"]["function_call"] == {"name": "now", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    streamed = put_together(chunks(answer, legacy=True))
    assert streamed["choices"][0]["message"]["function_call"] == {"name": "now", "arguments": "{}"}
    assert streamed["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("stop_reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
    ],
)
def test_why_it_stopped(stop_reason: Any, finish: str) -> None:
    answer = message(TEXT, stop_reason=stop_reason)
    assert whole(answer)["choices"][0]["finish_reason"] == finish
    assert chunks(answer)[-2]["choices"][0]["finish_reason"] == finish


def test_no_reason_to_stop_is_made_up() -> None:
    answer = message(TEXT, stop_reason=None)
    for told in (whole, chunks):
        with pytest.raises(Untranslatable, match="does not say why it ended"):
            told(answer)
    later = translator().whole(encoded(message(TEXT, stop_reason="came_later")))
    assert json.loads(later)["choices"][0]["finish_reason"] == "came_later"


def test_a_refusal_says_why() -> None:
    details = {"type": "refusal", "category": "bio", "explanation": "That could do harm."}
    answer = message(stop_reason="refusal", stop_details=details)
    assert whole(answer)["choices"][0]["message"]["refusal"] == "That could do harm."
    assert put_together(chunks(answer))["choices"][0]["message"]["refusal"] == "That could do harm."


def test_what_only_anthropic_knows_is_left_out() -> None:
    searched = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    answer = message(REDACTED, searched, found, TEXT)
    message_ = whole(answer)["choices"][0]["message"]
    assert message_ == {"role": "assistant", "content": TEXT["text"], "refusal": None}
    to_chat = translator()
    for event in (
        {"type": "ping"},
        {"type": "of_tomorrow", "delta": [7], "index": "x"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "EqoB"}},
        {"type": "content_block_delta", "index": 9, "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "content_block_stop", "index": 9},
        {"type": "message_delta"},
        {"type": "message_start"},
    ):
        assert to_chat.event(encoded(event)) == []


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    assert whole(message())["choices"][0]["message"]["content"] == ""
    assert put_together(chunks(message()))["choices"][0]["message"]["content"] == ""


BLOCKS = st.one_of(
    st.text(min_size=1, max_size=12).map(lambda text: {"type": "text", "text": text}),
    st.text(max_size=12).map(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=9), max_size=2).map(
        lambda given: {"type": "tool_use", "id": "toolu_1", "name": "f", "input": given}
    ),
    st.just(REDACTED),
)


@given(blocks=st.lists(BLOCKS, max_size=5), stop_reason=st.sampled_from(["end_turn", "max_tokens", "tool_use"]))
def test_a_stream_comes_to_the_same_as_the_whole_answer(blocks: list[dict[str, Any]], stop_reason: str) -> None:
    answer = message(*blocks, stop_reason=stop_reason)
    streamed, at_once = (
        _comparable(put_together(chunks(answer))),
        _comparable(ChatCompletion.model_validate(whole(answer)).model_dump(exclude_none=True)),
    )
    assert streamed == at_once


def _comparable(completion: dict[str, Any]) -> dict[str, Any]:
    completion.pop("object")
    for call in completion["choices"][0]["message"].get("tool_calls", []):
        call.pop("index", None)
        call["function"] = call["function"] | {"arguments": json.loads(call["function"]["arguments"])}
        call["function"].pop("parsed_arguments", None)
    return completion


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"7",
        b"[]",
        b"{}",
        b'{"type":7}',
        b'{"type":"content_block_delta","delta":7}',
        b'{"type":"content_block_start","content_block":{"type":"text","text":7}}',
        b'{"type":"message_start","message":"x"}',
        b'{"type":"message_start","message":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_what_is_no_event_is_told_as_such(data: bytes) -> None:
    with pytest.raises(Untranslatable):
        translator().event(data)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"content":7}', b'{"content":[7]}', b'{"content":[{}]}'])
def test_what_is_no_answer_is_told_as_such(data: bytes) -> None:
    with pytest.raises(Untranslatable):
        translator().whole(data)


class _Shouting:
    def event(self, data: bytes) -> list[bytes]:
        return [data.upper()] * 2

    def end(self) -> list[bytes]:
        return [b"END"]

    def whole(self, body: bytes) -> bytes:
        return body.upper()


def test_translators_stand_behind_each_other() -> None:
    chain = Chain(translator(), _Shouting())
    events = [found for event in events_of(message(TEXT)) for found in chain.event(encoded(event))]
    alone = translator()
    expected = [found for event in events_of(message(TEXT)) for found in alone.event(encoded(event))]
    assert events == [chunk.upper() for chunk in expected for _ in range(2)]
    assert chain.end() == [chunk.upper() for chunk in alone.end() for _ in range(2)] + [b"END"]
    assert chain.whole(encoded(message(TEXT))) == translator().whole(encoded(message(TEXT))).upper()
