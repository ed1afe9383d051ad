"""Chat completions told as Messages requests, held against what Anthropic takes."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ask import Body
from gateway.translation.messages_request import messages_request
from tests.standins.anthropic_checks import problem
from worker.protocol.errors import ApiError

MODEL = "claude-sonnet-4-6"
HI = {"role": "user", "content": "Hi"}
ADAPTIVE = {"type": "adaptive", "display": "summarized"}
PNG = base64.b64encode(b"\x89PNG").decode()
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}},
}


def call(id: str = "call_1", name: str = "weather", arguments: str = '{"city": "Bern"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def body(chat: dict[str, Any]) -> Body:
    return msgspec.json.decode(json.dumps(chat), type=Body)


def asked(*messages: dict[str, Any], model: str = MODEL, cap: int = 100, **fields: Any) -> dict[str, Any]:
    """What is asked of Anthropic, which it would not refuse."""
    chat = body({"messages": list(messages) or [HI]} | fields)
    request = json.loads(messages_request(chat, model=model, max_tokens=cap, stream=bool(fields.get("stream"))))
    assert problem(request) is None
    assert isinstance(request, dict)
    return request


def refused(*messages: dict[str, Any], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        messages_request(body({"messages": list(messages) or [HI]} | fields), model=MODEL, max_tokens=9, stream=False)
    assert caught.value.status == 400
    assert caught.value.body.param is not None
    return caught.value


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def test_a_plain_question() -> None:
    assert asked() == {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": [text("Hi")]}],
    }
    assert asked(stream=True)["stream"] is True


def test_system_and_developer_messages_are_the_system_prompt_wherever_they_stand() -> None:
    request = asked(
        {"role": "system", "content": "Be brief."},
        HI,
        {"role": "developer", "content": [text("Be kind.", cache_control={"type": "ephemeral"})]},
    )
    assert request["system"] == [text("Be brief."), text("Be kind.", cache_control={"type": "ephemeral"})]
    assert [turn["role"] for turn in request["messages"]] == ["user"]


def test_system_messages_alone_are_a_users() -> None:
    request = asked({"role": "system", "content": "Say hi."})
    assert "system" not in request
    assert request["messages"] == [{"role": "user", "content": [text("Say hi.")]}]


def test_neighbours_of_one_role_are_one_turn_and_empty_texts_are_left_out() -> None:
    request = asked(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text(" "), text("b")]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "d"},
    )
    assert request["messages"] == [
        {"role": "user", "content": [text("a"), text("b"), text("c")]},
        {"role": "assistant", "content": [text("No.")]},
        {"role": "user", "content": [text("d")]},
    ]


def test_an_answer_to_be_gone_on_with_does_not_end_in_white_space() -> None:
    request = asked(HI, {"role": "assistant", "content": "The answer is \n"})
    assert request["messages"][-1] == {"role": "assistant", "content": [text("The answer is")]}


def test_results_of_tools_stand_together_directly_behind_the_calls() -> None:
    request = asked(
        HI,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call(), call("call_2", "now", "")]},
        {"role": "user", "content": "Well?"},
        {"role": "tool", "tool_call_id": "call_2", "content": [text("noon")]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        tools=[WEATHER],
    )
    assert request["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                text("Let me see."),
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_2", "content": [text("noon")]},
                {"type": "tool_result", "tool_use_id": "call_1"},
                text("Well?"),
            ],
        },
    ]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "7", "not JSON", '"x"'])
def test_arguments_that_a_model_wrote_badly_do_not_end_the_conversation(arguments: str) -> None:
    request = asked(
        HI,
        {"role": "assistant", "tool_calls": [call(arguments=arguments)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "That was no JSON."},
    )
    assert request["messages"][1]["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_ids_that_anthropic_does_not_take_are_others_that_still_belong_together() -> None:
    request = asked(
        HI,
        {"role": "assistant", "tool_calls": [call("a:1"), call("a.1")]},
        {"role": "tool", "tool_call_id": "a.1", "content": "x"},
        {"role": "tool", "tool_call_id": "a:1", "content": "y"},
    )
    calls = [block["id"] for block in request["messages"][1]["content"]]
    results = [block["tool_use_id"] for block in request["messages"][2]["content"]]
    assert len(set(calls)) == 2
    assert results == calls[::-1]


def test_functions_as_they_were_before_tools() -> None:
    request = asked(
        HI,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
        functions=[{"name": "now"}],
        function_call={"name": "now"},
    )
    use = request["messages"][1]["content"][0]
    assert use["name"] == "now"
    assert request["messages"][2]["content"][0]["tool_use_id"] == use["id"]
    assert request["tools"] == [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    assert request["tool_choice"] == {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    refused(HI, {"role": "function", "name": "never", "content": "x"})


def test_images_and_files() -> None:
    request = asked(
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/jpg;base64,{PNG}", "detail": "low"}},
                {
                    "type": "image_url",
                    "image_url": {"url": "https://a.b/c.png"},
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PNG}", "filename": "a.pdf"}},
                {"type": "file", "file": {"file_data": "data:text/plain;base64,SGk="}},
            ],
        }
    )
    assert request["messages"][0]["content"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": PNG}},
        {
            "type": "image",
            "source": {"type": "url", "url": "https://a.b/c.png"},
            "cache_control": {"type": "ephemeral"},
        },
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
            "title": "a.pdf",
        },
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hi"}},
    ]


def test_data_that_escapes_what_need_not_be_escaped() -> None:
    part = b'{"type":"image_url","image_url":{"url":"data:image\\/png;base64,AB\\/+\\u0041"}}'
    chat = {"messages": msgspec.Raw(b'[{"role":"user","content":[' + part + b"]}]")}
    request = json.loads(messages_request(chat, model=MODEL, max_tokens=9, stream=False))
    assert request["messages"][0]["content"][0]["source"] == {
        "type": "base64",
        "media_type": "image/png",
        "data": "AB/+A",
    }


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "data:image/bmp;base64,AA=="}},
        {"type": "image_url", "image_url": {"url": "data:image/png,raw"}},
        {"type": "image_url", "image_url": {"url": "ftp://a/b"}},
        {"type": "image_url"},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "file", "file": {"file_data": "data:application/zip;base64,AA=="}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}},
        {"type": "text"},
        {"type": "text", "text": 7},
        {},
        7,
    ],
)
def test_parts_that_cannot_be_asked(part: Any) -> None:
    assert str(refused({"role": "user", "content": [part]}).body.param).startswith("messages[0].content[0]")


@pytest.mark.parametrize(
    ("fields", "tool_choice"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"type": "tool", "name": "weather"},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}},
            {"type": "any"},
        ),
    ],
)
def test_tools_and_how_they_may_be_called(fields: dict[str, Any], tool_choice: Any) -> None:
    other = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}, "strict": True}}
    request = asked(HI, tools=[WEATHER, other], **fields)
    tools = [
        {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object", "properties": {}}},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}, "strict": True},
    ]
    allowed_only = isinstance(fields.get("tool_choice"), dict) and "allowed_tools" in fields["tool_choice"]
    assert request["tools"] == tools[: 1 if allowed_only else 2]
    assert request.get("tool_choice") == tool_choice


def test_a_schema_is_sent_byte_for_byte() -> None:
    parameters = b'{ "type" : "object", "properties": {"x": {"maximum": 1.50e2}} }'
    chat = body({"messages": [HI]})
    chat["tools"] = msgspec.Raw(b'[{"type":"function","function":{"name":"f","parameters":' + parameters + b"}}]")
    assert parameters in messages_request(chat, model=MODEL, max_tokens=9, stream=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.7, "top_p": 0.5}, {"temperature": 1, "top_p": 0.5}),
        ({"temperature": 1, "top_p": 1.0}, {}),
        ({"stop": "END"}, {"stop_sequences": ["END"]}),
        ({"stop": ["a", "b "]}, {"stop_sequences": ["a", "b "]}),
        ({"user": "u1"}, {"metadata": {"user_id": "u1"}}),
        ({"user": "u1", "safety_identifier": "s1"}, {"metadata": {"user_id": "s1"}}),
        ({"user": "u" * 300}, {}),
        ({"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "modalities": ["text"]}, {}),
        ({"seed": 1, "frequency_penalty": 1.5, "presence_penalty": 1, "store": True, "verbosity": "low"}, {}),
        ({"max_tokens": 7, "max_completion_tokens": 8, "stream_options": {"include_usage": True}, "unknown": 1}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        (
            {"top_k": 5, "thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
            {"top_k": 5, "thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
        ),
        ({"tools": None, "stop": None, "temperature": None, "n": None, "response_format": None}, {}),
    ],
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(HI, **fields) == asked() | expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"logit_bias": {"50256": -100}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"web_search_options": {}},
        {"stop": "\n\n"},
        {"stop": ["x", ""]},
        {"stop": 7},
        {"temperature": 2.1},
        {"temperature": True},
        {"top_p": "much"},
        {"reasoning_effort": "huge"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "grammar"}},
        {"response_format": 7},
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": "perhaps"},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": [1]}}]},
        {"tools": {}},
        {"functions": [{"name": "x"}], "function_call": 7},
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(fields: dict[str, Any]) -> None:
    assert str(refused(HI, **fields).body.param).partition("[")[0].partition(".")[0] in fields


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": 7}],
        [{"role": "tool", "content": "x"}],
        [HI, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
        [HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f"}}]}],
        [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "https://a"}}]}],
        [7],
    ],
)
def test_messages_that_cannot_be_asked(messages: list[Any]) -> None:
    assert str(refused(*messages).body.param).startswith("messages")


def test_more_messages_than_can_be_read_in_a_moment() -> None:
    chat = {"messages": msgspec.Raw(b"[" + b",".join([b'{"role":"user","content":"a"}'] * 20_001) + b"]")}
    with pytest.raises(ApiError, match="20000"):
        messages_request(chat, model=MODEL, max_tokens=9, stream=False)


@pytest.mark.parametrize("deep", [b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000])
@pytest.mark.parametrize("field", ["messages", "tools", "response_format", "stop", "tool_choice", "n"])
def test_what_is_nested_deeply_is_refused(deep: bytes, field: str) -> None:
    chat = body({"messages": [HI]}) | {field: msgspec.Raw(deep)}
    with pytest.raises(ApiError):
        messages_request(chat, model=MODEL, max_tokens=9, stream=False)


@pytest.mark.parametrize(
    ("effort", "model", "expected"),
    [
        ("high", MODEL, {"thinking": ADAPTIVE, "output_config": {"effort": "high"}}),
        ("minimal", "some-alias", {"thinking": ADAPTIVE, "output_config": {"effort": "low"}}),
        ("none", "claude-opus-4-8", {"thinking": {"type": "disabled"}}),
        ("none", "claude-fable-5-1", {"output_config": {"effort": "low"}}),
        ("none", "claude-haiku-4-5-20251001", {}),
        ("medium", "claude-haiku-4-5-20251001", {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
        ("low", "claude-sonnet-4-20250514", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("high", "anthropic.claude-3-7-sonnet-20250219-v1:0", {"thinking": {"type": "enabled", "budget_tokens": 3276}}),
        ("high", "claude-3-5-haiku-20241022", {}),
    ],
)  # fmt: skip
def test_effort_of_reasoning_by_what_the_model_knows(effort: str, model: str, expected: dict[str, Any]) -> None:
    request = asked(HI, model=model, cap=4096, reasoning_effort=effort)
    assert {name: request[name] for name in ("thinking", "output_config") if name in request} == expected


def test_thinking_gives_way_to_what_excludes_it() -> None:
    assert "thinking" not in asked(HI, reasoning_effort="high", tools=[WEATHER], tool_choice="required")
    assert "temperature" not in asked(HI, reasoning_effort="high", temperature=0.5)
    assert asked(HI, reasoning_effort="none", temperature=0.5)["temperature"] == 0.5
    older = {"model": "claude-sonnet-4-5", "reasoning_effort": "high"}
    assert "thinking" not in asked(HI, cap=1024, **older)
    used = {"role": "assistant", "tool_calls": [call()]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    assert "thinking" not in asked(HI, used, result, cap=4096, **older)
    assert asked(HI, reasoning_effort="high", thinking={"type": "disabled"})["thinking"] == {"type": "disabled"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "file", "refusal", "input_audio"]) | JSON},
    optional={
        "text": st.text(max_size=5) | JSON,
        "refusal": st.text(max_size=5) | JSON,
        "image_url": st.sampled_from(["https://x/y", f"data:image/png;base64,{PNG}", {"url": "https://x"}]) | JSON,
        "file": st.just({"file_data": PNG}) | JSON,
    },
)
CALL = st.fixed_dictionaries(
    {"id": st.sampled_from(["call_1", "a:b"]) | JSON, "type": st.just("function") | JSON},
    optional={
        "function": st.fixed_dictionaries({"name": st.just("f") | JSON, "arguments": st.text(max_size=8) | JSON}) | JSON
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function", "developer"]) | JSON},
    optional={
        "content": st.text(max_size=5) | st.lists(PART | JSON, max_size=3) | JSON,
        "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON,
        "tool_call_id": st.sampled_from(["call_1", "a:b"]) | JSON,
        "function_call": st.just({"name": "f", "arguments": "{}"}) | JSON,
        "name": st.just("f") | JSON,
        "refusal": st.text(max_size=3) | JSON,
    },
)
FIELDS = ["tools", "tool_choice", "functions", "function_call", "stop", "temperature", "top_p", "n", "logprobs", "user"]
FIELDS += ["response_format", "reasoning_effort", "parallel_tool_calls", "modalities", "logit_bias", "output_config"]
CHATS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | JSON, max_size=5) | JSON},
    optional={field: JSON for field in FIELDS},
)


@given(chat=CHATS, max_tokens=st.integers(1, 5000), model=st.sampled_from([MODEL, "claude-3-7-sonnet", "x"]))
def test_whatever_is_asked_there_is_a_request_or_a_clear_refusal(
    chat: dict[str, Any], max_tokens: int, model: str
) -> None:
    try:
        request = json.loads(messages_request(body(chat), model=model, max_tokens=max_tokens, stream=False))
    except ApiError as error:
        assert error.status == 400
        assert error.body.message
        return
    roles = [turn["role"] for turn in request["messages"]]
    assert roles
    assert all(a != b for a, b in pairwise(roles))
    assert all(turn["content"] for turn in request["messages"])
