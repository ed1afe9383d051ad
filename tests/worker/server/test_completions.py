"""Plain completions over HTTP, with a scripted engine: every form of a prompt, echo, log-probabilities, streams."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.worker.server.asking import MODEL, TEXT, USER, http, sdk
from tests.worker.server.conftest import StartScripted
from worker.engine.plan import TokenLogprobs
from worker.protocol.errors import ApiError
from worker.server.choices import Update
from worker.server.completions import ChoiceText, Echo, _fill_in_middle
from worker.server.logprobs import CompletionTokens
from worker.server.tokenizer import Tokenizer

Choice = dict[str, Any]


async def both(client: Any, **request: Any) -> tuple[dict[int, Choice], Any]:
    """A request's whole answer, its choices equal to those of the stream put together."""
    answer = await client.completions.create(model=MODEL, **request)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    found = {choice.index: choice.to_dict() for choice in answer.choices}
    stream = await client.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **request
    )
    *chunks, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert last.usage.to_dict() | {"prompt_tokens_details": 0} == answer.usage.to_dict() | {"prompt_tokens_details": 0}
    joined: dict[int, Choice] = {}
    for chunk in chunks:
        (part,) = [choice.to_dict() for choice in chunk.choices]
        kept = joined.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
        assert "finish_reason" not in kept, "more came after the end"
        kept["text"] += part["text"]
        if part["logprobs"] is not None:
            pieces = kept["logprobs"] or {}
            kept["logprobs"] = {name: pieces.get(name, []) + more for name, more in part["logprobs"].items()}
        if part["finish_reason"] is not None:
            kept |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
    assert joined == found
    return found, answer


async def test_metrics_agree_with_the_usage(scripted: StartScripted) -> None:
    server = await scripted("one two three four five six")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "a b", "echo": True, "max_tokens": 0}),
        ("completions", {"prompt": ["a b", "c"], "stop": ["three"], "n": 2}),
        ("chat/completions", {"messages": USER, "stop": ["two"], "n": 3}),
    ]
    async with http(server) as client:
        answers = [await client.post(f"/v1/{path}", json={"model": MODEL} | body) for path, body in bodies]
        metrics = (await client.get("/metrics")).text
    usages = [answer.json()["usage"] for answer in answers]
    told = dict(re.findall(r"^penstock_(\w+)_tokens_total\{.*\} (.*)$", metrics, re.MULTILINE))
    assert float(told["generation"]) == sum(usage["completion_tokens"] for usage in usages)
    assert float(told["prompt"]) == sum(usage["prompt_tokens"] for usage in usages)


async def test_every_form_of_a_prompt(scripted: StartScripted, tokenizer: Tokenizer) -> None:
    server = await scripted("one two three")
    texts = ["Once upon a time", "The sea <|im_end|>"]
    ids = [tokenizer.encode(text, allow_special=True) for text in texts]
    async with sdk(server) as client:
        for prompt, lengths in (
            (texts[0], [len(ids[0])]),
            (ids[0], [len(ids[0])]),
            (texts, [len(some) for some in ids]),
            (ids, [len(some) for some in ids]),
        ):
            found, answer = await both(client, prompt=prompt, n=2)
            assert sorted(found) == list(range(2 * len(lengths)))
            assert all(choice["text"] == "one two three" for choice in found.values())
            assert {choice["finish_reason"] for choice in found.values()} == {"stop"}
            assert answer.usage.prompt_tokens == sum(lengths)
            assert answer.usage.completion_tokens == 4 * 2 * len(lengths)
        found, _ = await both(client, prompt="x", max_tokens=2)
        assert (found[0]["text"], found[0]["finish_reason"]) == ("one two", "length")
        found, _ = await both(client, prompt="x", stop=" thr")
        assert (found[0]["text"], found[0]["stop_reason"]) == ("one two", " thr")
        # What is not said is 16 tokens.
        answer = await client.completions.create(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["It is", "Wörter 👩‍🚀<|im_end|>!"])
async def test_an_echo_with_log_probabilities(scripted: StartScripted, tokenizer: Tokenizer, prompt: str) -> None:
    server = await scripted(TEXT)
    ids = tokenizer.encode(prompt, allow_special=True)
    async with sdk(server) as client:
        for given in (prompt, ids):
            for max_tokens, top in ((0, 1), (1, 0), (40, 5), (40, None)):
                found, answer = await both(client, prompt=given, echo=True, max_tokens=max_tokens, logprobs=top)
                choice = found[0]
                drawn = tokenizer.decode_bytes(tokenizer.encode(TEXT)[:max_tokens]).decode()
                assert choice["text"] == prompt + drawn
                assert choice["finish_reason"] == ("stop" if max_tokens == 40 else "length")
                count = len(tokenizer.encode(TEXT))
                assert answer.usage.completion_tokens == min(max_tokens, count + 1)
                assert answer.usage.prompt_tokens == len(ids)
                if top is None:
                    assert choice["logprobs"] is None
                else:
                    check(choice["logprobs"], choice["text"], len(ids) + min(max_tokens, count), top)


def check(logprobs: dict[str, Any], text: str, count: int, top: int) -> None:
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert set(logprobs["token_logprobs"][1:]) <= {-0.25}
    for token, tops in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert tops[token] == -0.25
        assert len(tops) == max(top, 1)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, start, end in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        assert token.startswith("bytes:") or token == text[start:end]


async def test_tokens_can_be_named_by_their_ids(scripted: StartScripted, tokenizer: Tokenizer) -> None:
    server = await scripted("one two")
    async with sdk(server) as client:
        found, _ = await both(
            client, prompt="It", echo=True, logprobs=2, extra_body={"return_tokens_as_token_ids": True}
        )
    ids = tokenizer.encode("It") + tokenizer.encode("one two")
    assert found[0]["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert set(found[0]["logprobs"]["top_logprobs"][1]) == {f"token_id:{ids[1]}", f"token_id:{ids[1] + 1}"}


async def test_clean_refusals(scripted: StartScripted) -> None:
    server = await scripted(max_model_len=100)
    async with sdk(server) as client:
        for request, param, said in (
            ({"prompt": ""}, "prompt", "empty text"),
            ({"prompt": ["x", ""]}, "prompt", "empty text"),
            ({"prompt": "x", "suffix": "y"}, "suffix", "no tokens to mark a gap"),
            ({"prompt": "word " * 100}, "prompt", "100 tokens"),
            ({"prompt": "word " * 10_000}, "prompt", "far longer"),
            ({"prompt": "x", "max_tokens": 100}, "max_tokens", "at most 99"),
            ({"prompt": ["x", [5]]}, "prompt", "list of texts"),
            ({"prompt": [49152]}, "prompt", "0 to 49151"),
            ({"prompt": ["x"] * 17}, "prompt", "17 sequences"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await client.completions.create(model=MODEL, **request)  # type: ignore[call-overload]
            assert (refused.value.param, said in refused.value.message) == (param, True), refused.value.message
        with pytest.raises(NotFoundError):
            await client.completions.create(model="other", prompt="x")


def test_a_suffix_goes_between_the_models_marks(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.decode_bytes([at]).decode("latin-1") for at in (17, 18, 19)]
    fills = Tokenizer(
        [*tokens, "<pre>", "<suf>", "<mid>", "<s>"],
        [],
        [1, 1, 1, 3, 3, 3, 3],
        "smollm",
        bos_token_id=6,
        add_bos=True,
        fill_in_middle=(3, 4, 5),
    )
    assert _fill_in_middle(fills, '#"') == ([6, 3], [4, 2, 1, 5])
    assert _fill_in_middle(fills, "") is None
    assert _fill_in_middle(tokenizer, "") is None
    with pytest.raises(ApiError, match="no tokens to mark a gap"):
        _fill_in_middle(tokenizer, "x")


def test_log_probabilities_of_half_a_prompt_are_no_answer(tokenizer: Tokenizer) -> None:
    known = TokenLogprobs(5, -0.5, 1, [], [])
    echo = Echo("one two", [4, 5, 6], [0, 3, 5])
    text = ChoiceText(echo, CompletionTokens(tokenizer, as_ids=False))
    assert text.add(Update(0, prompt_logprobs=[known])) == ""
    with pytest.raises(ApiError, match="time limit"):
        text.add(Update(0, began=True, finish_reason="length"))
