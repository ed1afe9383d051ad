"""Completions, embeddings and the WebSocket against the real worker."""

from __future__ import annotations

import json
import math

import openai
import pytest
from websockets.sync.client import connect

from tests.e2e.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

PROMPTS = ["The capital of France is", "One, two, three,"]


def test_completions_streamed_and_whole_and_their_rows(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPTS, temperature=0, max_tokens=8, n=2)
    whole = raw.parse()
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None
    row = stack.row(raw.headers["x-request-id"])
    # Each prompt counts once, however many choices go on with it.
    assert (row["prompt_tokens"], row["completion_tokens"]) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert row["completion_tokens"] == 4 * 8
    assert (row["api"], row["status"], row["over_bound"]) == ("completions", "ok", False)
    assert row["charged_nano_usd"] == 100 * row["prompt_tokens"] + 400 * row["completion_tokens"]

    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPTS[0],
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [8]

    echoed = client.completions.create(model=MODEL, prompt=PROMPTS[0], echo=True, max_tokens=0, logprobs=1)
    assert echoed.choices[0].text == PROMPTS[0]
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 0
    # Nothing is said of the cap: 16, as OpenAI has it.
    short = client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, extra_body={"ignore_eos": True}
    )
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


def test_embeddings_and_their_row(stack: Stack, client: openai.OpenAI) -> None:
    inputs = ["A penstock leads water.", "It leads water into turbines.", "<|im_start|> und Ünïcode 日本"]
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=inputs, encoding_format="base64")
    asked = raw.parse()
    floats = client.embeddings.create(model=MODEL, input=inputs, encoding_format="float")
    assert [each.index for each in floats.data] == [0, 1, 2]
    for one, other in zip(asked.data, client.embeddings.create(model=MODEL, input=inputs).data, strict=True):
        assert isinstance(one.embedding, str)
        assert math.isclose(sum(value * value for value in other.embedding), 1.0, rel_tol=1e-3)
    row = stack.row(raw.headers["x-request-id"])
    assert (row["api"], row["status"], row["completion_tokens"], row["over_bound"]) == ("embeddings", "ok", 0, False)
    assert row["prompt_tokens"] == asked.usage.prompt_tokens
    assert row["charged_nano_usd"] == 100 * row["prompt_tokens"]
    ids = client.embeddings.create(model=MODEL, input=[[1, 2, 3], [4]])
    assert (len(ids.data), ids.usage.prompt_tokens) == (2, 4)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=[[1, 10**9]])
    assert caught.value.param == "input"


def test_a_websocket_streams_the_same_text_and_a_cancel_stops_the_worker(stack: Stack, client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask, max_tokens=16)  # type: ignore[call-overload]
    address = stack.url.replace("http", "ws", 1) + "/v1/realtime-chat"
    headers = {"authorization": f"Bearer {stack.key}", "x-penstock-heads": "1"}
    with connect(address, additional_headers=headers) as connection:
        connection.send(json.dumps(ask | {"max_tokens": 16}))
        head = json.loads(connection.recv(timeout=30))
        text = ""
        while (frame := connection.recv(timeout=30)) != "[DONE]":
            text += json.loads(frame)["choices"][0]["delta"].get("content") or ""
        assert text == whole.choices[0].message.content
        assert stack.row(head["headers"]["x-request-id"])["status"] == "ok"
        connection.send(json.dumps(ask | {"max_tokens": 2000, "ignore_eos": True}))
        head = json.loads(connection.recv(timeout=30))
        connection.recv(timeout=30)
        connection.send('{"type": "cancel"}')
        while json.loads(connection.recv(timeout=30)) != {"type": "cancelled"}:
            pass
    row = stack.row(head["headers"]["x-request-id"])
    assert row["status"] == "aborted"
    assert 0 < row["completion_tokens"] < 2000
