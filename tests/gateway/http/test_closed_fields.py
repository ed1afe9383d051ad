"""No field of any API gets a backend to do more than the gateway knows of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.ask import Ask
from gateway.http.anthropic.ask import parse_messages
from gateway.http.openai.ask import parse_chat
from gateway.http.openai.completions import parse_completion
from gateway.http.openai.embeddings import parse_embedding
from gateway.http.openai.fields import read_body, read_value
from gateway.translation.responses_request import read_request
from worker.protocol.errors import ApiError

Parse = Callable[[bytes], Any]
MESSAGES = [{"role": "user", "content": "hi"}]


def parse_response(raw: bytes) -> Any:
    return read_request(read_body(raw, "input"))


DOORS: list[tuple[Parse, dict[str, Any]]] = [
    (parse_chat, {"messages": MESSAGES}),
    (parse_messages, {"messages": MESSAGES, "max_tokens": 5}),
    (parse_completion, {"prompt": "hi"}),
    (parse_embedding, {"input": "hi"}),
    (parse_response, {"input": "hi"}),
]


def refused(parse: Parse, raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(raw)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("parse", "prompt"), DOORS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_asks_for_more_or_for_another_model_is_refused(parse: Parse, prompt: dict[str, Any]) -> None:
    for field, value in {"n_predict": 9999, "models": ["dear"], "priority": -9, "lora_path": "x"}.items():
        assert refused(parse, json.dumps({"model": "m", field: value} | prompt).encode()).body.param == field
        parse(json.dumps({"model": "m", field: None} | prompt).encode())


@pytest.mark.parametrize(("parse", "prompt"), DOORS, ids=lambda value: getattr(value, "__name__", ""))
def test_no_field_comes_by_another_spelling(parse: Parse, prompt: dict[str, Any]) -> None:
    # Servers written in Go obey all of these; the last has a long s, and a Kelvin sign for its k.
    for field in ("MODEL", "Max_Tokens", "N_Predict", "\u017ftream", "max_to\u212aens"):
        assert refused(parse, json.dumps({"model": "m", field: 1} | prompt).encode()).body.param == field
    parse(json.dumps({"model": "m", "X-Mine": 1, "größe": 2} | prompt).encode())


def test_usage_cannot_be_turned_off_by_another_spelling() -> None:
    options = {"include_usage": True, "Include_Usage": False}
    raw = json.dumps({"model": "m", "messages": MESSAGES, "stream": True, "stream_options": options}).encode()
    assert refused(parse_chat, raw).body.param == "stream_options"


def test_chats_are_not_embedded_beside_a_text() -> None:
    raw = json.dumps({"model": "m", "input": "hi", "messages": MESSAGES}).encode()
    assert refused(parse_embedding, raw).body.param == "messages"


def test_completions_have_one_name_for_their_cap() -> None:
    raw = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 1, "max_completion_tokens": 9999}).encode()
    assert refused(parse_completion, raw).body.param == "max_completion_tokens"


def test_what_is_drawn_and_not_given_counts_in_chats_too() -> None:
    def choices(**fields: int) -> int:
        ask: Ask = parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())
        return ask.choices

    assert (choices(n=2, best_of=5), choices(best_of=4), choices(n=3)) == (5, 4, 3)
    raw = json.dumps({"model": "m", "input": "hi", "best_of": 5}).encode()
    assert refused(parse_response, raw).body.param == "best_of"


@pytest.mark.parametrize("field", ["model", "user", "stream", "n"])
def test_what_is_inside_of_a_wrong_value_is_not_read(field: str) -> None:
    lists = msgspec.Raw(b"[" + b"[]," * 100_000 + b"[]]")
    assert read_value({field: lists}, field) is lists
    raw = msgspec.json.encode({"model": "m", "messages": MESSAGES, field: lists})
    assert refused(parse_chat, raw).body.param == field
