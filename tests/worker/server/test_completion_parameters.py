"""Bodies of completions and embeddings: every form of a prompt, and refusals that name their field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.protocol.errors import ApiError
from worker.server.completion_parameters import CompletionParameters, read_completion_parameters
from worker.server.embeddings import EmbeddingParameters, read_embedding_parameters


def read(**fields: Any) -> CompletionParameters:
    return read_completion_parameters(json.dumps({"model": "m", "prompt": "p"} | fields).encode(), 1000)


def read_embedding(**fields: Any) -> EmbeddingParameters:
    return read_embedding_parameters(json.dumps({"model": "m", "input": "p"} | fields).encode(), 1000, 64)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([5, 0, 999], [[5, 0, 999]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("", [""]),
    ],
    ids=range(5),
)
def test_forms_of_prompts(given: Any, expected: Any) -> None:
    assert read(prompt=given).prompts == expected
    assert read_embedding(input=given).inputs == expected


def test_defaults() -> None:
    got = read()
    assert (got.echo, got.logprobs, got.suffix, got.stream, got.add_special) == (False, False, "", False, True)
    assert (got.drawing.max_tokens, got.drawing.choices) == (16, 1)
    vectors = read_embedding()
    assert (vectors.pooling, vectors.as_base64, vectors.add_special) == ("mean", False, True)


def test_values_are_taken() -> None:
    got = read(echo=True, logprobs=0, max_tokens=0, n=2, best_of=2, add_special_tokens=False)
    assert (got.echo, got.logprobs, got.drawing.max_tokens, got.drawing.choices) == (True, True, 0, 2)
    assert (got.drawing.sampling.logprobs, got.drawing.sampling.prompt_logprobs, got.add_special) == (0, 0, False)
    assert read(logprobs=5).drawing.sampling.prompt_logprobs is None
    assert read_embedding(pooling="last", encoding_format="base64", dimensions=64).as_base64


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": None}, "prompt", "wrong type"),
        ({"prompt": 5}, "prompt", "wrong type"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty list"),
        ({"prompt": ["a", 5]}, "prompt", "must be a text, a list of texts"),
        ({"prompt": [[5], 5]}, "prompt", "must be a text, a list of texts"),
        ({"prompt": [1000]}, "prompt", "0 to 999"),
        ({"prompt": [[5], [-1]]}, "prompt", "holds the token id -1"),
        ({"prompt": [10**4200]}, "prompt", "0 to 999"),
        ({"prompt": ["a"] * 2049}, "prompt", "At most 2048"),
        ({"prompt": [{}]}, "prompt[0]", "wrong type"),
        ({"logprobs": 6}, "logprobs", "between 0 and 5"),
        ({"logprobs": -1}, "logprobs", "between 0 and 5"),
        ({"logprobs": True}, "logprobs", "wrong type"),
        ({"best_of": 3}, "best_of", "'n' choices"),
        ({"best_of": 1, "n": 2}, "best_of", "'n' choices"),
        ({"max_tokens": 0}, "max_tokens", "only with 'echo'"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0"),
        ({"suffix": "s", "echo": True}, "suffix", "not with 'echo'"),
        ({"suffix": "s", "prompt": [5]}, "suffix", "prompts that are text"),
        ({"stream_options": {}}, "stream_options", "only with 'stream'"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"n": 0}, "n", "between 1"),
        ({"guided_regex": "("}, "guided_regex", "can't be followed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.body.param) == (400, param)
    assert said in caught.value.body.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [1000]}, "input"),
        ({"dimensions": 32}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"pooling": "m" * 100_000}, "pooling"),
        ({"normalize": False}, "normalize"),
    ],
)
def test_a_refusal_of_embeddings_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_embedding(**fields)
    assert (caught.value.status, caught.value.body.param) == (400, param)
    assert len(caught.value.body.message) < 400


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(ApiError, match="'prompt' is missing"):
        read_completion_parameters(b'{"model": "m"}', 1000)
    with pytest.raises(ApiError, match="'input' is missing"):
        read_embedding_parameters(b'{"model": "m"}', 1000, 64)
