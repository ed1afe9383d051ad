"""Responses requests as chat completions: each form, and what cannot be told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.translation.responses_request import MAX_OBJECTS, ResponsesRequest, read_request
from worker.protocol.errors import ApiError


def raw_of(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


def read(body: dict[str, Any]) -> ResponsesRequest:
    return read_request(raw_of({"model": "m"} | body))


def chat_of(body: dict[str, Any], earlier: list[Any] | None = None) -> dict[str, Any]:
    raw = [msgspec.Raw(json.dumps(item).encode()) for item in earlier or ()]
    chat: dict[str, Any] = json.loads(msgspec.json.encode(read(body).chat(raw)))
    return chat


def refused(body: dict[str, Any], earlier: list[Any] | None = None) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat_of(body, earlier)
    assert raised.value.status == 400
    assert raised.value.body.message
    return raised.value


def call(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


def tool_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let "}, {"type": "refusal", "refusal": "no"}],
        },
        call("a"),
        call("b"),
        output("b"),
        output("a"),
        call("c"),
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "one"}] * 2},
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": "http://x/y.png"},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
    ]
    assert chat_of({"input": items, "instructions": "Be brief."})["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Let no", "tool_calls": [tool_call("a"), tool_call("b")]},
        {"role": "tool", "tool_call_id": "b", "content": "done"},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "one"}] * 2},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
    ]


def test_an_earlier_conversation_stands_before_the_input_but_behind_the_instructions() -> None:
    earlier = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, call("a")]
    body = {"input": [output("a")], "instructions": "Now.", "previous_response_id": "resp_1"}
    assert [message["role"] for message in chat_of(body, earlier)["messages"]] == [
        *("system", "user", "assistant", "tool"),
    ]
    assert chat_of({"previous_response_id": "resp_1"}, earlier[:1])["messages"] == earlier[:1]


def test_fields_move_to_where_chat_completions_have_them() -> None:
    chat = chat_of(
        {
            "input": "Hi",
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "max_output_tokens": 7,
            "temperature": 0,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {
                "verbosity": "low",
                "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            },
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 0,
            "tools": [FUNCTION | {"strict": None, "description": "d"}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "metadata": {"a": "b"},
            "store": False,
            "truncation": "auto",
            "background": False,
            "max_tool_calls": 3,
            "user": "ann",
            "prompt_cache_key": "k",
            "service_tier": None,
            "top_k": 5,
            "n": 1,
        }
    )
    assert chat == {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
        "temperature": 0,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 0,
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "user": "ann",
        "prompt_cache_key": "k",
        "top_k": 5,
        "model": "m",
    }


def test_tool_choices() -> None:
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    named = chat_of({"input": "a", "tools": tools, "tool_choice": {"type": "function", "name": "g"}})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    some = chat_of({"input": "a", "tools": tools, "tool_choice": allowed})
    assert [tool["function"]["name"] for tool in some["tools"]] == ["g"]
    assert some["tool_choice"] == "required"
    none = chat_of({"input": "a", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True})
    assert not none.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]},
            "input[0].content[0].file_url",
        ),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "a"}, output("x")]}, "input[1]"),
        ({"input": [call("x")]}, "input"),
        ({"input": [call("")]}, "input[0]"),
        ({"input": "a", "tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tools": {"type": "function"}}, "tools"),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools[0]"),
        ({"input": "a", "tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
        ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": "a", "text": "json"}, "text"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "a", "include": "x"}, "include"),
        ({"input": "a", "metadata": {"a": 5}}, "metadata[...]"),
        ({"input": "a", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 1.5}, "max_output_tokens"),
        ({"input": "a", "stream": "yes"}, "stream"),
        ({"input": "a", "store": 1}, "store"),
        ({"input": "a", "instructions": ["a"]}, "instructions"),
        ({"input": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": {"id": "c"}}, "conversation"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refused(body).body.param == param


def test_faults_of_an_earlier_conversation_are_told_apart() -> None:
    error = refused({"previous_response_id": "resp_1", "input": "a"}, [{"type": "web_search_call"}])
    assert error.body.param == "previous_response_id.type"
    assert refused({"previous_response_id": "r", "input": [5]}, [call("a")]).body.param == "input[0]"


def test_wild_bytes_are_refused_in_good_time() -> None:
    deep = msgspec.Raw(b"[" * 20_000 + b"]" * 20_000)
    many = msgspec.Raw(b"[" + b"{}," * MAX_OBJECTS + b"{}]")
    numbers = msgspec.Raw(b"[" + b"1," * 1_000_000 + b"1]")
    lone = msgspec.Raw(b'"\\ud800"')
    long = msgspec.Raw(b"9" * 5000)
    fields = ["input", "tools", "tool_choice", "text", "metadata", "reasoning", "instructions", "include", "user"]
    for field in [*fields, "max_output_tokens"]:
        for value in (deep, many, numbers, lone, long):
            body = {"model": msgspec.Raw(b'"m"'), "input": msgspec.Raw(b'"a"')} | {field: value}
            try:
                read_request(body).chat([])
            except ApiError as error:
                assert error.status == 400
            else:
                assert field == "user"  # not ours to read


wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["message", "user", "assistant", "function_call", "input_text", "function", "json_schema"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "call_id", "name", "arguments", "output", "format", "schema"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
FIELDS = ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "store"]
FIELDS += ["stream", "max_output_tokens", "previous_response_id", "top_logprobs", "truncation", "temperature", "other"]


@given(st.dictionaries(st.sampled_from(FIELDS), wild), st.lists(wild, max_size=2))
def test_any_request_is_a_chat_completion_or_a_refusal(body: dict[str, Any], earlier: list[Any]) -> None:
    try:
        chat = chat_of(body, earlier)
    except ApiError as error:
        assert error.status == 400
        assert error.body.message
        return
    assert chat["messages"]
    for message in chat["messages"]:
        assert message["role"] in ("system", "developer", "user", "assistant", "tool")
