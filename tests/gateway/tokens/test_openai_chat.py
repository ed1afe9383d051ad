"""Counting as OpenAI documents it; whatever it says nothing of is bounded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens import chat
from gateway.tokens.encoding import Encoding, published_encoding
from gateway.tokens.methods import Body, OpenAIMethod


@pytest.fixture(scope="module")
def encoding() -> Encoding:
    return published_encoding("cl100k_base")


def count(encoding: Encoding, messages: Any, model: str = "gpt-4o", **fields: Any) -> int | None:
    raw = json.dumps({"model": "m", "messages": messages} | fields).encode()
    body = msgspec.json.decode(raw, type=Body)
    read = chat.read_messages(bytes(body["messages"]))
    return OpenAIMethod(encoding).count(read, body, model, lambda encoding, text: encoding.count(text))


def test_a_chat_has_the_tokens_that_openais_reference_tells_of_it(encoding: Encoding) -> None:
    example = [{"role": "developer", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello!"}]
    assert count(encoding, example) == 19
    named = [example[0], example[1] | {"name": "Ada"}]
    assert count(encoding, named) == 19 + 1 + encoding.count("Ada")


def test_fields_that_clients_send_empty_or_that_stay_outside_cost_nothing(encoding: Encoding) -> None:
    alone = count(encoding, [{"role": "user", "content": "hi"}])
    assert alone == 8
    empty = {"tool_calls": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert count(encoding, [{"role": "user", "content": "hi"} | empty]) == alone
    outside = {
        "temperature": 0.5,
        "metadata": {"a": "b" * 99},
        "stop": ["x" * 99],
        "tools": [],
        "response_format": None,
    }
    assert count(encoding, [{"role": "user", "content": "hi"}], **outside) == alone


def test_what_is_not_documented_counts_by_its_bytes(encoding: Encoding) -> None:
    alone = count(encoding, [{"role": "user", "content": "hi"}])
    assert alone is not None
    tools = [{"type": "function", "function": {"name": "f", "description": "é" * 50, "parameters": {}}}]
    assert count(encoding, [{"role": "user", "content": "hi"}], tools=tools) == alone + 3 + len(json.dumps(tools))
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    more = count(encoding, [{"role": "user", "content": "hi"}], response_format=format)
    assert more == alone + 3 + len(json.dumps(format))
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    more = count(encoding, [{"role": "user", "content": "hi"}, call])
    assert more == alone + 3 + len(json.dumps(call))


def test_images_count_by_the_table(encoding: Encoding) -> None:
    def tokens(model: str, **image: Any) -> int:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000} | image}
        found = count(encoding, [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}], model)
        assert found is not None
        return found - 9

    assert tokens("gpt-4o-2024-08-06") == 1445
    assert tokens("gpt-4o", detail="low") == 85
    assert tokens("gpt-4o-mini") == tokens("some-other-model") == 48169
    assert tokens("gpt-4.1-mini") == 2489
    assert tokens("gpt-5") == 1190


def test_what_lies_elsewhere_has_no_bound(encoding: Encoding) -> None:
    file = {"type": "file", "file": {"file_id": "file-1"}}
    assert count(encoding, [{"role": "user", "content": [file]}]) is None
    assert count(encoding, [{"role": "user", "content": "hi"}], web_search_options={"a": 1}) is None
    assert count(encoding, [{"role": "assistant", "audio": {"id": "audio-1"}}]) is None
    disguised = {"type": "text", "text": "hi", "image_url": {"url": "https://x"}}
    assert count(encoding, [{"role": "user", "content": [disguised]}]) is None
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    found = count(encoding, [{"role": "user", "content": [audio]}])
    assert found is not None
    assert found > len(json.dumps(audio))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), JSON), max_size=4))
@settings(max_examples=80)
def test_messages_of_any_shape_are_counted_or_not_and_never_too_short(
    encoding: Encoding, messages: list[dict[str, Any]]
) -> None:
    found = count(encoding, messages)
    texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
    if found is not None:
        assert found >= 3 + 3 * len(messages) + sum(encoding.count(text) for text in texts)
