"""Bodies of completions and embeddings as they come from strangers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ask import Ask
from gateway.http.openai.completions import parse_completion
from gateway.http.openai.embeddings import parse_embedding
from gateway.http.openai.inputs import MAX_INPUTS, read_inputs
from worker.protocol.errors import ApiError


def completion(**fields: Any) -> Ask:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def embedding(**fields: Any) -> Ask:
    return parse_embedding(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def refused(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(st.integers(0, 10**9), min_size=1, max_size=5)


@given(
    value=TEXT | IDS | st.lists(TEXT, min_size=1, max_size=5) | st.lists(IDS, min_size=1, max_size=5),
    ascii_only=st.booleans(),
    spaces=st.sampled_from([None, 1, "\t"]),
)
def test_every_prompt_is_found_as_it_came(value: Any, ascii_only: bool, spaces: Any) -> None:
    several = isinstance(value, list) and not isinstance(value[0], int)
    raw = json.dumps({"prompt": value}, ensure_ascii=ascii_only, indent=spaces).encode()
    found = read_inputs(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), "prompt")
    assert [json.loads(entry) for entry in found] == (value if several else [value])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_no_prompt_is_refused_and_nothing_fails_otherwise(value: Any) -> None:
    try:
        ask = completion(prompt=value)
    except ApiError as error:
        assert (error.status, error.body.param) == (400, "prompt")
    else:
        kinds = {type(each) for each in value} if isinstance(value, list) else {str}
        assert kinds in ({str}, {int}, {list})
        assert len(ask.inputs) == (len(value) if kinds in ({str}, {list}) and isinstance(value, list) else 1)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 5, True, {}, {"text": "hi"}, ["a", 1], ["a", [1]], [[1], "a"], [1, "a"], [1.5], [[1.5]], [-1], [[-1]]),
        *([[]], [[1], []], [[[1]]], [None], [True], ["a", None], [{"text": "a"}]),
    ],
    ids=str,
)
def test_a_mixture_is_named(value: Any) -> None:
    for error in (refused(completion, prompt=value), refused(embedding, input=value)):
        assert error.body.param in ("prompt", "input")
        assert "list of lists of token ids" in error.body.message


def test_an_empty_list_and_too_many_are_refused() -> None:
    assert refused(embedding, input=[]).body.code == "empty_array"
    assert len(embedding(input=["x"] * MAX_INPUTS).inputs) == MAX_INPUTS
    for value in (["x"] * (MAX_INPUTS + 1), [[1]] * (MAX_INPUTS + 1)):
        assert str(MAX_INPUTS) in refused(embedding, input=value).body.message
    # A list of ids is one prompt.
    assert len(completion(prompt=list(range(MAX_INPUTS + 1))).inputs) == 1


def test_outputs_are_counted_over_prompts_and_choices() -> None:
    assert completion().choices == 1
    assert completion(n=3).choices == 3
    assert completion(n=3, best_of=5).choices == 5
    assert completion(n=None, best_of=None, prompt=["a", "b"]).choices == 2
    assert completion(n=2, best_of=4, prompt=[[1, 2], [3]]).choices == 8


def test_reads_what_the_gateway_needs_and_passes_the_rest() -> None:
    ask = completion(
        stream=True,
        stream_options={"include_usage": True},
        suffix="end",
        logprobs=2,
        echo=True,
        max_tokens=0,
        user="ada",
    )
    assert (ask.api, ask.prompt_field, ask.stream, ask.include_usage) == ("completions", "prompt", True, True)
    assert (ask.max_output_tokens, ask.end_user, ask.chat) == (0, "ada", None)
    assert bytes(ask.body["suffix"]) == b'"end"'
    asked = embedding(input=["a", "b"], encoding_format="base64", dimensions=8, odd={"kept": [1]})
    assert (asked.api, asked.prompt_field, asked.max_output_tokens) == ("embeddings", "input", None)
    assert bytes(asked.body["odd"]) == b'{"kept": [1]}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": "2"}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"user": 5}, "user"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).body.param == param


def test_embeddings_are_not_streamed() -> None:
    assert embedding(stream=False).stream is False
    assert refused(embedding, stream=True).body.param == "stream"


def test_only_the_prompt_may_be_large() -> None:
    assert completion(prompt=["x" * 2_000_000]).size > 2_000_000
    assert completion(prompt=list(range(300_000))).size > 1_000_000
    assert "beside its 'prompt'" in refused(completion, suffix="x" * 2_000_000).body.message


@given(st.binary(max_size=100))
def test_no_bytes_make_it_fail_otherwise(raw: bytes) -> None:
    for parse in (parse_completion, parse_embedding):
        try:
            parse(raw)
        except ApiError as error:
            assert error.status == 400
