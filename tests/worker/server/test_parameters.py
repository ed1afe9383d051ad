"""Bodies are checked field by field, and each refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.protocol.errors import ApiError
from worker.server.parameters import ChatParameters, read_chat_parameters

USER = {"role": "user", "content": "Hi"}


def read(**fields: Any) -> ChatParameters:
    return read_chat_parameters(json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def test_defaults() -> None:
    got = read()
    assert (got.model, got.stream, got.include_usage, got.max_tokens, got.stop) == ("m", False, False, None, [])
    assert (got.sampling.temperature, got.sampling.top_p, got.ignore_eos) == (1.0, 1.0, False)
    assert got.messages == [USER]


def test_values_are_taken_and_zero_is_a_value() -> None:
    got = read(
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_p=0.5,
        seed=0,
        stop=["a", "b"],
        max_tokens=7,
        ignore_eos=True,
    )
    assert (got.stream, got.include_usage, got.max_tokens, got.stop) == (True, True, 7, ["a", "b"])
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.seed) == (0.0, 0.5, 0)
    assert got.ignore_eos


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert [read(temperature=t).sampling.temperature for t in (5e-324, 1e-300, 1e-6, 0.01)] == [0, 0, 0, 0.01]


def test_null_is_absent() -> None:
    names = ["stream", "stream_options", "temperature", "top_p", "seed", "stop", "max_tokens", "n", "tools", "logprobs"]
    assert read(**dict.fromkeys(names)).sampling.temperature == 1.0


def test_a_missing_seed_is_drawn_anew_each_time() -> None:
    assert len({read().sampling.seed for _ in range(20)}) == 20


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_seed_is_taken_and_kept(seed: int) -> None:
    assert read(seed=seed).sampling.seed == read(seed=seed).sampling.seed
    assert 0 <= read(seed=seed).sampling.seed < 2**63


def test_the_newer_name_of_max_tokens_counts() -> None:
    got = read(max_tokens=5, max_completion_tokens=9)
    assert (got.max_tokens, got.max_tokens_field) == (9, "max_completion_tokens")
    assert read(max_tokens=5).max_tokens_field == "max_tokens"


def test_roles_and_parts_are_brought_to_the_templates_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "n"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
    ]
    assert read(messages=messages).messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
    ]


def test_unknown_fields_are_ignored() -> None:
    assert read(user="u", metadata={"a": "b"}, store=False, something_new=[1], service_tier="auto").model == "m"


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"tools": []},
        {"tool_choice": "none"},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"top_k": -1},
        {"modalities": ["text"]},
        {"bad_words": [], "include_stop_str_in_output": False, "add_generation_prompt": True, "echo": False},
        {"max_tokens": (1 << 31) - 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_ask_for_nothing_are_allowed(neutral: dict[str, Any]) -> None:
    assert read(**neutral).model == "m"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 2}, "n", "one choice a request"),
    ({"n": 0}, "n", "one choice a request"),
    ({"tools": [{"type": "function"}]}, "tools", "does not support 'tools'"),
    ({"tool_choice": "required"}, "tool_choice", "does not support"),
    ({"functions": [{}]}, "functions", "does not support"),
    ({"logprobs": True}, "logprobs", "does not support"),
    ({"top_logprobs": 3}, "top_logprobs", "does not support"),
    ({"response_format": {"type": "json_object"}}, "response_format", "does not support"),
    ({"response_format": "json"}, "response_format", "does not support"),
    ({"presence_penalty": 0.5}, "presence_penalty", "does not support"),
    ({"logit_bias": {"50": -100}}, "logit_bias", "does not support"),
    ({"top_k": 5}, "top_k", "does not support"),
    ({"modalities": ["text", "audio"]}, "modalities", "does not support"),
    ({"model": 5}, "model", "wrong type"),
    ({"model": None}, "model", "wrong type"),
    ({"messages": None}, "messages", "wrong type"),
    ({"messages": "Hi"}, "messages", "wrong type"),
    ({"messages": ["Hi"]}, "messages[0]", "wrong type"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role", "must be one of: system"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", '"king"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "does not support tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "does not support tools"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", '"type": "text"'),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", '"type": "text"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "reads text alone",
    ),
    ({"stream": "yes"}, "stream", "wrong type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with 'stream'"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "wrong type"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 1 << 31}, "max_tokens", "at most 2147483647"),
    ({"max_completion_tokens": 10**4299}, "max_completion_tokens", "at most 2147483647"),
    ({"max_tokens": -(10**4298)}, "max_tokens", "at least 1"),
    ({"messages": [{"role": 10**4299, "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": json.loads("[" * 900 + "]" * 900), "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"bad_words": ["x"]}, "bad_words", "does not support"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "does not support"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "does not support"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "does not support"),
    ({"continue_final_message": True}, "continue_final_message", "does not support"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "does not support"),
    ({"echo": True}, "echo", "does not support"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": "7"}, "max_tokens", "wrong type"),
    ({"max_tokens": 7.5}, "max_tokens", "wrong type"),
    ({"temperature": -0.1}, "temperature", "between 0 and 2"),
    ({"temperature": 2.1}, "temperature", "between 0 and 2"),
    ({"temperature": "hot"}, "temperature", "wrong type"),
    ({"temperature": True}, "temperature", "wrong type"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.1}, "top_p", "at most 1"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": -(2**63) - 1}, "seed", "64 bits"),
    ({"seed": 1.5}, "seed", "wrong type"),
    ({"stop": 5}, "stop", "wrong type"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": ["a", 5]}, "stop[1]", "wrong type"),
    ({"stop": ["a"] * 17}, "stop", "At most 16"),
    ({"stop": "a" * 1025}, "stop", "At most 1024"),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD, ids=[f"{at}-{case[1]}" for at, case in enumerate(BAD)])
def test_a_refusal_names_its_field_and_the_remedy(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.body.param == param
    assert caught.value.body.type == "invalid_request_error"
    assert said in caught.value.body.message


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    fields = {"model": "m", "messages": [USER]}
    del fields[name]
    with pytest.raises(ApiError, match=f"'{name}' is missing") as caught:
        read_chat_parameters(json.dumps(fields).encode())
    assert caught.value.body.param == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"temperature": 1e999}',
    ],
    ids=range(12),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat_parameters(body)
    assert (caught.value.status, caught.value.body.code) == (400, "invalid_json")
