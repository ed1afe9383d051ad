"""Embeddings over HTTP, with a scripted engine; and ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from transformers import PreTrainedTokenizerFast

from tests.worker.server.asking import FLEET, MODEL, USER, error_of, frames, http, sdk
from tests.worker.server.conftest import StartScripted
from tests.worker.server.test_chat_answers import HERMES, TOOLS
from worker.protocol.errors import ApiError
from worker.protocol.sse import Comment, Event
from worker.protocol.usage import decode_meter
from worker.server.choices import Update
from worker.server.embeddings import EmbeddingWriter, base64_of, normalised
from worker.server.tokenizer import Tokenizer


def vector_of(first_token: int) -> list[float]:
    """What the script's engine makes of a prompt, at length 1."""
    length = math.hypot(first_token, *[1.0] * 63)
    return [value / length for value in [first_token] + [1.0] * 63]


async def test_every_form_of_an_input(scripted: StartScripted, tokenizer: Tokenizer) -> None:
    server = await scripted()
    texts = ["Once upon a time", "The sea", "Hi"]
    ids = [tokenizer.encode(text) for text in texts]
    async with sdk(server) as client:
        for given, expected in ((texts[0], ids[:1]), (ids[0], ids[:1]), (texts, ids), (ids, ids)):
            # The client asks for base64 unless told otherwise.
            as_base64: Any = await client.embeddings.create(model=MODEL, input=given)
            as_floats: Any = await client.embeddings.create(model=MODEL, input=given, encoding_format="float")
            for answer in (as_base64, as_floats):
                assert [(one.index, one.object) for one in answer.data] == [
                    (at, "embedding") for at in range(len(expected))
                ]
                for one, prompt in zip(answer.data, expected, strict=True):
                    assert one.embedding == pytest.approx(vector_of(prompt[0]), rel=1e-6)
                tokens = sum(map(len, expected))
                assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
        last = await client.embeddings.create(model=MODEL, input="Hi", extra_body={"pooling": "last"}, dimensions=64)
        assert len(last.data[0].embedding) == 64
        for request, said in (
            ({"input": ""}, "empty text"),
            ({"input": "Hi", "dimensions": 8}, "64 dimensions"),
            ({"input": "word " * 300}, "256 tokens"),
        ):
            with pytest.raises(BadRequestError, match=said):
                await client.embeddings.create(model=MODEL, **request)  # type: ignore[arg-type]


async def test_embeddings_are_metered(scripted: StartScripted) -> None:
    server = await scripted(max_batched_tokens=16)
    async with http(server) as client:
        headers = FLEET | {"x-penstock-meter": "1"}
        body = {"model": MODEL, "input": ["word " * 40, "Hi"]}
        answer = await client.post("/v1/embeddings", json=body, headers=headers)
    found = frames(answer.content)
    readings = [decode_meter(frame.text) for frame in found if isinstance(frame, Comment)]
    last = readings[-1]
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (42, 0)
    assert last.compute_us > 0
    assert len([frame for frame in found if isinstance(frame, Event)]) == 2


def test_vectors_on_the_wire() -> None:
    assert normalised([3.0, -4.0]) == [0.6, -0.8]
    assert normalised([0.0, 0.0]) == [0.0, 0.0]
    assert struct.unpack("<2f", base64.b64decode(base64_of([0.5, -2.0]))) == (0.5, -2.0)


async def test_tokens_and_back(
    scripted: StartScripted, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast
) -> None:
    server = await scripted(chat_template=HERMES, max_model_len=512)

    async with http(server) as client:

        async def post(path: str, **body: Any) -> Any:
            answer = await client.post(path, json=body)
            return answer.json() if answer.status_code == 200 else error_of(answer.content)

        text = "Wörter 👩‍🚀<|im_end|>!"
        told = await post("/tokenize", model=MODEL, prompt=text, return_token_strs=True)
        assert told["tokens"] == reference.encode(text)
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
        assert "<|im_end|>" in told["token_strs"]
        assert await post("/detokenize", tokens=told["tokens"]) == {"prompt": text}
        assert (await post("/tokenize", prompt=""))["tokens"] == []
        info = (await client.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<|im_start|>", "<|im_end|>", HERMES)

        talk = [*USER, {"role": "assistant", "content": "It is"}]
        for options in (
            {},
            {"add_generation_prompt": False},
            {"tools": TOOLS},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            told = await post("/tokenize", messages=talk, **options)
            expected = reference.apply_chat_template(
                talk, chat_template=HERMES, return_dict=False, **{"add_generation_prompt": True} | options
            )
            assert told["tokens"] == expected, options
            assert told["token_strs"] is None
        assert (await post("/tokenize"))["message"] == "Send either 'prompt' or 'messages'."
        assert (await post("/tokenize", prompt="x", messages=USER))["message"] == "Send either 'prompt' or 'messages'."
        assert (await post("/tokenize", prompt="x", model="other"))["code"] == "model_not_found"
        assert (await post("/detokenize", tokens=[49152]))["param"] == "tokens"
        assert (await post("/detokenize", tokens="x"))["param"] == "tokens"


async def test_tokens_are_for_those_who_may_ask(scripted: StartScripted) -> None:
    server = await scripted(token_required=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/embeddings"):
            assert (await client.post(path, json={})).status_code == 401
            assert (await client.post(path, json={}, headers=FLEET)).status_code == 400


def test_no_vector_is_left_out_in_silence() -> None:
    writer = EmbeddingWriter("m", as_base64=False)
    writer.push(Update(0, embedding=[1.0], finish_reason="stop"))
    with pytest.raises(ApiError, match="time limit") as late:
        writer.push(Update(1, finish_reason="length"))
    assert (late.value.status, late.value.body.code) == (504, "request_timeout")
