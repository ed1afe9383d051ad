"""Bodies are checked field by field, and each refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.engine.messages import Grammar
from worker.engine.plan import SamplingParams
from worker.protocol.errors import ApiError
from worker.server.parameters import ChatParameters, read_chat_parameters

USER = {"role": "user", "content": "Hi"}


VOCAB = 1000


def read(**fields: Any) -> ChatParameters:
    return read_chat_parameters(json.dumps({"model": "m", "messages": [USER]} | fields).encode(), VOCAB)


def sampling(**fields: Any) -> SamplingParams:
    """What the engine is told of the second choice."""
    drawing = read(**fields).drawing
    assert drawing.seed is None or 0 <= drawing.seed < 2**63
    return drawing.of_choice(1, drawing.seed or 7, [2])


def test_defaults() -> None:
    got = read()
    drawing = got.drawing
    assert (got.model, got.stream, got.include_usage, got.logprobs) == ("m", False, False, False)
    assert (drawing.choices, drawing.max_tokens, drawing.stop, drawing.stop_token_ids) == (1, None, [], [])
    assert (drawing.ignore_eos, drawing.include_stop, drawing.show_special, drawing.grammar) == (False,) * 3 + (None,)
    assert got.prompting.messages == [USER]
    assert sampling() == SamplingParams(seed=7, choice=1)
    assert sampling().is_plain


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
        n=3,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    drawing = got.drawing
    assert (got.stream, got.include_usage, drawing.max_tokens, drawing.stop) == (True, True, 7, ["a", "b"])
    assert (drawing.sampling.temperature, drawing.sampling.top_p, drawing.seed) == (0.0, 0.5, 0)
    assert (drawing.ignore_eos, drawing.include_stop, drawing.show_special, drawing.choices) == (True, True, True, 3)


def test_what_shapes_the_draw_reaches_the_engine() -> None:
    got = sampling(
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"0": -100, "999": 5.5},
        allowed_token_ids=[3, 5],
        min_tokens=4,
        stop_token_ids=[9, 2],
        logprobs=True,
        top_logprobs=5,
    )
    assert got == SamplingParams(
        seed=7,
        choice=1,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 999: 5.5},
        allowed_token_ids=[3, 5],
        min_tokens=4,
        stop_token_ids=[2, 9],
        logprobs=5,
    )


def test_what_ends_a_sequence() -> None:
    assert read().drawing.ends([2, 3]) == [2, 3]
    assert read(stop_token_ids=[9, 3]).drawing.ends([2, 3]) == [2, 3, 9]
    assert read(stop_token_ids=[9], ignore_eos=True).drawing.ends([2, 3]) == [9]


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 5])
def test_top_k_may_ask_for_all(top_k: int) -> None:
    assert sampling(top_k=top_k).is_plain


@pytest.mark.parametrize(("top", "expected"), [(None, 0), (0, 0), (1, 1), (20, 20)])
def test_log_probabilities_with_so_many_of_the_likeliest(top: int | None, expected: int) -> None:
    assert sampling(logprobs=True, top_logprobs=top).logprobs == expected
    assert sampling(top_logprobs=0).logprobs is None


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert [sampling(temperature=t).temperature for t in (5e-324, 1e-300, 1e-6, 0.01)] == [0, 0, 0, 0.01]


def test_null_is_absent() -> None:
    names = ["stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "n", "tools"]
    names += ["logprobs", "top_logprobs", "logit_bias", "min_p", "min_tokens", "response_format", "guided_json"]
    assert read(**dict.fromkeys(names)) == read()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_seed_is_taken_and_kept(seed: int) -> None:
    got = read(seed=seed).drawing.seed
    assert got is not None
    assert got == read(seed=seed).drawing.seed
    assert 0 <= got < 2**63


def test_the_newer_name_of_max_tokens_counts() -> None:
    got = read(max_tokens=5, max_completion_tokens=9).drawing
    assert (got.max_tokens, got.max_tokens_field) == (9, "max_completion_tokens")
    assert read(max_tokens=5).drawing.max_tokens_field == "max_tokens"


def test_a_form_becomes_a_grammar() -> None:
    assert read(guided_regex="[ab]+").drawing.grammar == Grammar("regex", "[ab]+")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = read(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}).drawing.grammar
    assert made is not None
    assert made.kind == "json_schema"
    text = {"type": "text"}
    for fields, name in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": text, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": text}, None),
        ({}, None),
    ):
        assert read(**fields).drawing.grammar_field == name


def test_every_text_of_a_prompt_counts() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["x" * 100, 1, None]}}}
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "name": "n" * 50, "content": "c" * 30}]
    plain = read().prompting
    assert read(messages=talk).prompting.text_bytes - plain.text_bytes >= 182
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 500}}
    assert plain.tool_bytes == 0
    assert read(tools=[tool]).prompting.tool_bytes >= 500


def test_unknown_fields_are_ignored() -> None:
    assert read(user="u", metadata={"a": "b"}, store=False, something_new=[1], service_tier="auto").model == "m"


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"tools": []},
        {"tool_choice": "none"},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"bad_words": [], "echo": False, "best_of": 1},
        {"max_tokens": (1 << 31) - 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_ask_for_nothing_are_allowed(neutral: dict[str, Any]) -> None:
    assert read(**neutral).model == "m"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "between 1 and 128"),
    ({"functions": [{}]}, "functions", "does not support"),
    ({"logprobs": 5}, "logprobs", "wrong type"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
    ({"top_logprobs": 3}, "top_logprobs", "only with 'logprobs'"),
    ({"response_format": "json"}, "response_format", "must be"),
    ({"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"repetition_penalty": 11}, "repetition_penalty", "at most 10"),
    ({"logit_bias": {"50": -101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "0 to 999"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "0 to 999"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "0 to 999"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "0 to 999"),
    ({"logit_bias": [1]}, "logit_bias", "wrong type"),
    ({"top_k": -2}, "top_k", "at least 1"),
    ({"top_k": 1.5}, "top_k", "wrong type"),
    ({"min_p": 1.1}, "min_p", "between 0 and 1"),
    ({"min_p": -0.1}, "min_p", "between 0 and 1"),
    ({"min_tokens": -1}, "min_tokens", "between 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above 'max_tokens'"),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "0 to 999"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "At most 64"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "wrong type"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "0 to 999"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "field of its own"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "may not set"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "may not set"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "can't both be true",
    ),
    (
        {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": ""}]},
        "continue_final_message",
        "needs text",
    ),
    ({"best_of": 2}, "best_of", "does not support"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "does not support"),
    ({"use_beam_search": True}, "use_beam_search", "does not support"),
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
        read_chat_parameters(json.dumps(fields).encode(), VOCAB)
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
        read_chat_parameters(body, VOCAB)
    assert (caught.value.status, caught.value.body.code) == (400, "invalid_json")
