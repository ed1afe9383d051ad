"""Messages are brought to the form of chat templates; each refusal names the message."""

from __future__ import annotations

from typing import Any

import pytest

from worker.protocol.errors import ApiError
from worker.server.messages import read_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def called(arguments: Any) -> Any:
    """The arguments of a call as a template gets them."""
    call = {"id": "call_1", "function": {"name": "f", "arguments": arguments}}
    return read_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"][0]["function"]["arguments"]


def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts, "name": "n", "refusal": None},
            {"role": "assistant", "content": None, "audio": None, "tool_calls": []},
            {"role": "assistant", "content": "", "reasoning_content": "r"},
            {"role": "tool", "content": parts, "tool_call_id": "call_1"},
        ]
    ) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"role": "tool", "content": "a\nb", "tool_call_id": "call_1"},
    ]


def test_a_call_keeps_its_id_and_gets_its_arguments_as_an_object() -> None:
    (message,) = read_messages([{"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}])
    assert message["content"] == "Let me see."
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ("{" * 100_000, "{" * 100_000),
    ],
    ids=range(7),
)
def test_arguments_that_are_no_object_stay_text(given: Any, read: Any) -> None:
    """Models write such, and clients send back what they were given."""
    assert called(given) == read


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "function", "content": "x"}, "role", "must be one of: system, developer"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "'tool_calls'"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "only the assistant"),
        ({"role": "user", "content": "x", "name": 5}, "name", "must be text"),
        ({"role": "tool"}, "content", "must be text"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id", "must be text"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls", "must be a list"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0]", '"type": "function"'),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0]", '"type": "function"'),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 5}]}, "tool_calls[0].id", "must be text"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function.name", "missing"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "tool_calls[0].function.arguments",
            "must be text",
        ),
    ],
)
def test_a_refusal_names_the_message(message: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": "user", "content": "Hi"}, message])
    assert (caught.value.status, caught.value.body.param) == (400, f"messages[1].{param}")
    assert said in caught.value.body.message
