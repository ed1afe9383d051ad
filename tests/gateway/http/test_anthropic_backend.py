"""Anthropic behind every door, over real sockets, with the SDKs of both sides; only Anthropic itself is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.http.admin.support import client_of, made
from tests.standins import base
from tests.standins.anthropic import Anthropic
from tests.standins.base import Reply

TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
QUESTION: Any = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def declared(gateway: Any) -> AsyncIterator[Anthropic]:
    async with Anthropic(needs_key=True) as standin, client_of(gateway) as client:
        fields = {"name": "claude", "pool": "pool", "brand": "anthropic", "base_url": standin.url}
        await made(client, "/backends", **fields, api_key=base.KEY, context_length=1000, model="claude-sonnet-4-6")
        yield standin


def asked(standin: Anthropic) -> list[Reply]:
    """What it answered to all but the gateway's probes."""
    return [reply for request, reply in zip(standin.seen, standin.sent, strict=False) if request.method == "POST"]


def openai_of(gateway: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=gateway.key, max_retries=0)


def anthropic_of(gateway: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


async def test_all_doors_reach_it(gateway: Any) -> None:
    async with declared(gateway), openai_of(gateway) as ours, anthropic_of(gateway) as theirs:
        chat = await ours.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL])
        called = chat.choices[0].message.tool_calls
        assert called is not None
        assert [call.id for call in called] == [call.id for call in base.CALLS]
        assert chat.choices[0].finish_reason == "tool_calls"
        assert chat.model == "m"
        async with ours.chat.completions.stream(
            model="m", messages=[QUESTION], stream_options={"include_usage": True}
        ) as stream:
            completion = await stream.get_final_completion()
        assert completion.choices[0].message.content == base.TEXT
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == 9
        async with theirs.messages.stream(model="m", max_tokens=20, messages=[QUESTION]) as messages:
            message = await messages.get_final_message()
        assert message.content[0].type == "text"
        assert message.content[0].text == base.TEXT
        assert (message.model, message.usage.cache_read_input_tokens) == ("m", 4)
        response = await ours.responses.create(model="m", input="Hi", store=False)
        assert response.output_text == base.TEXT
        rows = await gateway.rows(4)
        assert [(row.api, row.status, row.prompt_tokens, row.cached_tokens) for row in rows] == [
            (api, "ok", 9, 4) for api in ("chat_completions", "chat_completions", "messages", "responses")
        ]
        assert {row.usage_source for row in rows} == {"backend"}


async def test_its_errors_are_told_in_each_doors_words(gateway: Any) -> None:
    async with declared(gateway) as standin, openai_of(gateway) as ours, anthropic_of(gateway) as theirs:
        standin.scenario = "context_length"
        with pytest.raises(openai.BadRequestError) as of_openai:
            await ours.chat.completions.create(model="m", messages=[QUESTION])
        assert of_openai.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError) as of_anthropic:
            await theirs.messages.create(model="m", max_tokens=20, messages=[QUESTION])
        sent = asked(standin)[-1].body
        assert of_anthropic.value.response.content == sent
        standin.scenario = "loading"
        with pytest.raises(openai.InternalServerError) as busy:
            await ours.chat.completions.create(model="m", messages=[QUESTION])
        assert (busy.value.status_code, busy.value.code) == (503, "engine_overloaded")
        with pytest.raises(anthropic.OverloadedError) as overloaded:
            await theirs.messages.create(model="m", max_tokens=20, messages=[QUESTION])
        assert overloaded.value.response.content == asked(standin)[-1].body
        standin.scenario = "unauthorized"
        with pytest.raises(anthropic.InternalServerError) as hidden:
            await theirs.messages.create(model="m", max_tokens=20, messages=[QUESTION])
        assert "x-api-key" not in str(hidden.value)


async def test_what_it_cannot_be_asked_is_a_bad_request_that_costs_nothing(gateway: Any) -> None:
    async with declared(gateway) as standin, openai_of(gateway) as ours:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await ours.chat.completions.create(
                    model="m", messages=[QUESTION], n=2, stream=stream, max_completion_tokens=9
                )
            assert caught.value.param == "n"
        assert asked(standin) == []
        rows = await gateway.rows(2)
        assert [(row.status, row.error_code, row.attempts, row.charged_nano_usd) for row in rows] == [
            ("failed", "invalid_request_error", 0, 0)
        ] * 2
        answer = await ours.chat.completions.create(model="m", messages=[QUESTION])
        assert answer.choices[0].message.content == base.TEXT
