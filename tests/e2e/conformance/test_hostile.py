"""Backends that do wrong in each way that is known: the client's status and exception are right, and so is the row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import anthropic
import openai
import pytest
import pytest_asyncio
from sqlalchemy import select

from gateway.db.tables import usage_events
from gateway.settings import Settings
from tests.e2e.conformance.hostile_cases import CASES, Case, Mode
from tests.e2e.conformance.targets import CACHED, INPUT, OUTPUT, Clients, Declared, clients_of, declare
from tests.gateway.conftest import Conversation, Gateway, Upstream, running_gateway

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

DOORS: Final = ("chat_completions", "messages", "responses")
OPENAIS: Final[dict[int, type[Exception]]] = {
    400: openai.BadRequestError,
    409: openai.ConflictError,
    413: openai.APIStatusError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
}
ANTHROPICS: Final[dict[int, type[Exception]]] = {
    400: anthropic.BadRequestError,
    409: anthropic.ConflictError,
    413: anthropic.RequestTooLargeError,
    422: anthropic.UnprocessableEntityError,
    429: anthropic.RateLimitError,
    503: anthropic.ServiceUnavailableError,
    504: anthropic.DeadlineExceededError,
    529: anthropic.OverloadedError,
}


@dataclass
class Got:
    """By a client."""

    text: str = ""
    streaming: bool = False
    fault: Exception | None = None


@dataclass(frozen=True)
class Place:
    gateway: Gateway
    clients: Clients
    upstream: Upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(gateway_settings: Settings) -> AsyncIterator[Place]:
    scripts = {case.name + "." + mode: case.send for case in CASES for mode in case.modes}

    async def converse(c: Conversation) -> None:
        _, path, _ = c.head.split(" ")
        await scripts[path.split("/")[1]](c)

    upstream = Upstream([converse])
    await upstream.start()
    await declare(
        gateway_settings.database_url,
        [
            Declared(
                f"{case.name}.{mode}.{door}",
                case.brand,
                f"{upstream.url}/{case.name}.{mode}",
                case.first_byte_timeout_s,
                case.idle_timeout_s,
            )
            for case in CASES
            for mode in case.modes
            for door in DOORS
        ],
    )
    async with running_gateway(gateway_settings) as gateway, clients_of(gateway.url, gateway.key) as clients:
        yield Place(gateway, clients, upstream)
    await upstream.stop()
    assert upstream.failures == []


async def call(clients: Clients, door: str, model: str, mode: Mode, request_id: str) -> Got:
    got = Got()
    more: Any = {"model": model, "stream": mode == "streamed", "extra_headers": {"x-request-id": request_id}}
    question: Any = [{"role": "user", "content": "Capital of France?"}]
    calls: dict[str, Any] = {
        "chat_completions": lambda: clients.openai.chat.completions.create(messages=question, **more),
        "responses": lambda: clients.openai.responses.create(input="Capital of France?", store=False, **more),
        "messages": lambda: clients.anthropic.messages.create(messages=question, max_tokens=50, **more),
    }
    try:
        answer = await calls[door]()
        if mode == "whole":
            got.text = text_of(door, answer)
            return got
        got.streaming = True
        async for event in answer:
            got.text += piece_of(door, event)
    except (openai.OpenAIError, anthropic.AnthropicError) as fault:
        got.fault = fault
    return got


def text_of(door: str, answer: Any) -> str:
    if door == "responses":
        return str(answer.output_text)
    if door == "messages":
        return "".join(block.text for block in answer.content)
    return answer.choices[0].message.content or ""


def piece_of(door: str, event: Any) -> str:
    if door == "responses":
        return str(event.delta) if event.type == "response.output_text.delta" else ""
    if door == "messages":
        return str(event.delta.text) if event.type == "content_block_delta" else ""
    return "".join(choice.delta.content or "" for choice in event.choices if choice.delta)


async def row_of(gateway: Gateway, request_id: str) -> Any:
    """The one row of the request."""
    query = select(usage_events).where(usage_events.c.client_request_id == request_id)
    async with asyncio.timeout(10):
        while True:
            async with gateway.engine.connect() as connection:
                rows = list(await connection.execute(query))
            if rows:
                assert len(rows) == 1
                return rows[0]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("case", "mode"), [pytest.param(case, mode, id=f"{case.name}-{mode}") for case in CASES for mode in case.modes]
)
async def test_the_client_and_the_ledger_learn_what_happened(place: Place, case: Case, mode: Mode) -> None:
    names = {door: f"{case.name}.{mode}.{door}" for door in DOORS}
    ids = {door: str(uuid4()) for door in DOORS}
    found = await asyncio.gather(*(call(place.clients, door, names[door], mode, ids[door]) for door in DOORS))
    for door, got in zip(DOORS, found, strict=True):
        check_client(case, door, mode, got)
    for door in DOORS:
        row = await row_of(place.gateway, ids[door])
        assert (row.api, row.route, row.backend) == (door, names[door], names[door])
        check_row(case, row)


def check_client(case: Case, door: str, mode: Mode, got: Got) -> None:
    outcome = case.outcome
    if outcome.code is None:
        assert got.fault is None, (door, got)
        # Half a surrogate pair is passed on where nothing is translated.
        text = got.text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert text == outcome.text, door
        return
    fault: Any = got.fault
    assert fault is not None, (door, got)
    assert got.text == outcome.text, door
    if outcome.status == 200:
        assert got.streaming, door
        if door == "messages":
            assert isinstance(fault, anthropic.APIStatusError)
        else:
            assert type(fault) is openai.APIError, door
        return
    assert not got.streaming, door
    status, classes, rest = outcome.status, OPENAIS, openai.InternalServerError
    if door == "messages":
        status = 529 if case.brand == "anthropic" and status == 503 else status
        classes, rest = ANTHROPICS, anthropic.InternalServerError
    assert fault.status_code == status, (door, fault)
    assert type(fault) is classes.get(status, rest), (door, fault)
    assert fault.message
    if outcome.retry_after is not None:
        assert fault.response.headers["retry-after"] == outcome.retry_after


def check_row(case: Case, row: Any) -> None:
    outcome = case.outcome
    assert (row.status, row.error_code) == ("ok" if outcome.code is None else "failed", outcome.code), row.api
    found = (row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.usage_source)
    prompt = outcome.prompt
    if prompt is None:
        prompt = row.prompt_tokens
        assert prompt > 0
    assert found == (prompt, outcome.completion, outcome.cached, outcome.source), row.api
    charged = (prompt - outcome.cached) * INPUT + outcome.cached * CACHED + outcome.completion * OUTPUT
    # What was never handed on is not charged.
    assert row.charged_nano_usd == (charged if outcome.status == 200 else 0)
