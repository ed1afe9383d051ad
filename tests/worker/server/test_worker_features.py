"""The real model behind the real server process: what a request may ask for beside text, by the official SDK."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.worker.server.conftest import MODEL, WorkerProcess
from worker.server.tokenizer import Tokenizer

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture
async def client(worker: WorkerProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_choices_differ_and_a_seed_fixes_them(client: AsyncOpenAI) -> None:
    story: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 1.2,
        "max_tokens": 4,
        "seed": 5,
    }

    async def texts(**more: Any) -> list[str | None]:
        answer = await client.chat.completions.create(**story | more)
        return [choice.message.content for choice in answer.choices]

    three = await texts(n=3)
    assert len(set(three)) == 3
    assert await texts(n=3) == three
    assert await texts() == three[:1]
    streamed = ["", "", ""]
    async for chunk in await client.chat.completions.create(**story, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == three


async def test_log_probabilities_of_an_answer_are_those_of_its_echo(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    prompt = "The capital of France is"
    drawn = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=5, logprobs=2)
    assert drawn.choices[0].logprobs is not None
    given = drawn.choices[0].logprobs
    assert given.token_logprobs is not None
    assert given.top_logprobs is not None
    assert given.tokens is not None
    for token, logprob, tops in zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True):
        assert logprob == max(tops.values()) == tops[token], "a greedy token is the likeliest"
        assert sum(map(math.exp, tops.values())) <= 1 + 1e-6
    echoed = await client.completions.create(
        **GREEDY, prompt=prompt + drawn.choices[0].text, max_tokens=0, echo=True, logprobs=1
    )
    told = echoed.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    count = len(tokenizer.encode(prompt))
    assert told.tokens is not None
    assert told.tokens[count:] == given.tokens
    assert told.token_logprobs[count:] == pytest.approx(given.token_logprobs, abs=1e-3)
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 0


async def test_tokens_can_be_forbidden_and_forced(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    async def ask(**more: Any) -> str | None:
        answer = await client.chat.completions.create(**GREEDY, messages=FRANCE, max_tokens=6, **more)
        return answer.choices[0].message.content

    plain = await ask()
    assert plain is not None
    assert "Paris" in plain
    (paris,) = tokenizer.encode(" Paris")
    assert "Paris" not in (await ask(logit_bias={str(paris): -100}) or "")
    assert await ask(logit_bias={str(paris): 100}) == " Paris" * 6
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    assert (await ask(extra_body={"allowed_token_ids": digits}) or "").isdigit()


async def test_a_form_rules_the_text(client: AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        **GREEDY,
        messages=FRANCE,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    found = json.loads(choice.message.content or "")
    assert set(found) == {"city", "big"}
    assert found["city"] in ("Paris", "Rome")
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(**GREEDY, messages=FRANCE, extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_can_be_required(client: AsyncOpenAI, stream: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2, 3]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    request: Any = GREEDY | {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 30,
    }
    if stream:
        name, arguments, reasons = "", "", []
        async for chunk in await client.chat.completions.create(**request, stream=True):
            (choice,) = chunk.choices
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for piece in choice.delta.tool_calls or []:
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert reasons == ["tool_calls"]
    else:
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert whole.message.tool_calls is not None
        (call,) = whole.message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["days"] in (1, 2, 3)


async def test_embeddings_tell_what_is_alike(client: AsyncOpenAI) -> None:
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Interest rates rose by 2% in March."]
    answer = await client.embeddings.create(model=MODEL, input=texts)
    cat, couch, rates = (one.embedding for one in answer.data)
    assert len(cat) == 576
    assert math.hypot(*cat) == pytest.approx(1, abs=1e-5)

    def product(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert product(cat, couch) > product(cat, rates)
    last = await client.embeddings.create(model=MODEL, input=texts[0], extra_body={"pooling": "last"})
    assert product(last.data[0].embedding, cat) < 0.999


async def test_a_prompt_seen_before_is_found(client: AsyncOpenAI) -> None:
    long: Any = [{"role": "user", "content": "Say yes. " + "The sea is wide and blue. " * 40}]
    details = []
    for _ in range(2):
        answer = await client.chat.completions.create(**GREEDY, messages=long, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        details.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert answer.usage.prompt_tokens > 256
    assert details == [0, answer.usage.prompt_tokens // 128 * 128]
