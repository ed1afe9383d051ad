"""What the engine can do, asked for through the gateway: several choices, forms, tools, and the prefix cache."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import jsonschema
import openai
import pytest

from tests.e2e.stack import MODEL, Stack

pytestmark = pytest.mark.e2e

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "description": "Looks up a city.", "parameters": CITY}}
]


def test_choices_with_log_probabilities_are_billed_together(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CAPITAL, n=2, temperature=1.2, seed=5, max_tokens=8, logprobs=True, top_logprobs=2
    )
    answer = raw.parse()
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(entry.token for entry in choice.logprobs.content or []) == choice.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content or [])
    assert answer.usage is not None
    assert stack.row(raw.headers["x-request-id"])["completion_tokens"] == answer.usage.completion_tokens


def test_an_answer_keeps_to_its_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, response_format=form, temperature=1, seed=1, max_tokens=80
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), CITY)


def test_a_forced_call_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    ask: Any = {
        "model": MODEL,
        "messages": CAPITAL,
        "tools": TOOLS,
        "tool_choice": named,
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason in ("stop", "tool_calls")
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    deltas = [
        piece
        for chunk in client.chat.completions.create(**ask, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert [piece.function.name for piece in deltas if piece.function and piece.function.name] == ["look_up"]
    arguments = "".join(piece.function.arguments or "" for piece in deltas if piece.function)
    assert arguments == call.function.arguments


def test_a_prompt_is_found_again_by_its_tenant_alone(stack: Stack, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": f"{uuid4().hex} Be brief. " * 8}, *CAPITAL]

    def cached(asker: openai.OpenAI) -> tuple[int, int]:
        """Of the prompt's tokens, those that were in the cache: by the answer and by the row."""
        raw = asker.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=4
        )
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0, stack.row(raw.headers["x-request-id"])["cached_tokens"]

    assert cached(client) == (0, 0)
    told, recorded = cached(client)
    assert told == recorded > 0
    name = f"t-{uuid4().hex[:8]}"
    stack.operator("tenant", "create", name)
    shown = stack.operator("key", "create", "--tenant", name)
    key = next(word for word in shown.split() if word.startswith("sk-penstock-"))
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as other:
        assert cached(other) == (0, 0)
