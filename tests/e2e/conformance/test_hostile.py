"""Backends that do wrong in each way that is known: the client's status and exception are right, and so is the row."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

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

AT_ONCE: Final = 16
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
class Try:
    """One request for one case, through one door."""

    case: Case
    mode: Mode
    door: str

    @property
    def name(self) -> str:
        """Of its route and of its backend."""
        return f"{self.case.name}.{self.mode}.{self.door}"


@dataclass(frozen=True)
class Came:
    """What became of all tries."""

    to_clients: dict[str, Got]
    to_the_ledger: dict[str, list[Any]]


TRIES: Final = [Try(case, mode, door) for case in CASES for mode in case.modes for door in DOORS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def came(gateway_settings: Settings) -> AsyncIterator[Came]:
    """All are tried at once, for most of the time is spent waiting."""
    scripts = {each.name: each.case.send for each in TRIES}
    heard = {each.name: asyncio.Event() for each in TRIES}

    async def converse(c: Conversation) -> None:
        name = c.head.split("/")[1]
        await scripts[name](c, heard[name])

    upstream = Upstream([converse])
    await upstream.start()
    declared = [
        Declared(
            each.name,
            each.case.brand,
            f"{upstream.url}/{each.name}",
            each.case.first_byte_timeout_s,
            each.case.idle_timeout_s,
        )
        for each in TRIES
    ]
    await declare(gateway_settings.database_url, declared)
    places = asyncio.Semaphore(AT_ONCE)
    async with running_gateway(gateway_settings) as gateway, clients_of(gateway.url, gateway.key) as clients:

        async def one(each: Try) -> Got:
            async with places:
                return await call(clients, each, heard[each.name])

        found = await asyncio.gather(*map(one, TRIES))
        rows: dict[str, list[Any]] = {each.name: [] for each in TRIES}
        for row in await rows_of(gateway, len(TRIES)):
            rows[row.route].append(row)
        yield Came({each.name: got for each, got in zip(TRIES, found, strict=True)}, rows)
    await upstream.stop()
    assert upstream.failures == []


async def rows_of(gateway: Gateway, count: int) -> list[Any]:
    """The ledger, once it has ``count`` rows; if it does not come to that, what it has."""
    rows: list[Any] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while len(rows) < count:
                await asyncio.sleep(0.1)
                async with gateway.engine.connect() as connection:
                    rows = list(await connection.execute(select(usage_events)))
    return rows


async def call(clients: Clients, each: Try, heard: asyncio.Event) -> Got:
    door, got = each.door, Got()
    more: Any = {"model": each.name, "stream": each.mode == "streamed"}
    question: Any = [{"role": "user", "content": "Capital of France?"}]
    calls: dict[str, Any] = {
        "chat_completions": lambda: clients.openai.chat.completions.create(messages=question, **more),
        "responses": lambda: clients.openai.responses.create(input="Capital of France?", store=False, **more),
        "messages": lambda: clients.anthropic.messages.create(messages=question, max_tokens=50, **more),
    }
    if not each.case.outcome.text:
        heard.set()
    try:
        answer = await calls[door]()
        if each.mode == "whole":
            got.text = text_of(door, answer)
            return got
        got.streaming = True
        async for event in answer:
            got.text += piece_of(door, event)
            if got.text == each.case.outcome.text:
                heard.set()
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


@pytest.mark.parametrize("each", TRIES, ids=lambda each: each.name)
async def test_the_client_and_the_ledger_learn_what_happened(came: Came, each: Try) -> None:
    check_client(each.case, each.door, came.to_clients[each.name])
    (row,) = came.to_the_ledger[each.name]
    assert (row.api, row.streamed, row.backend) == (each.door, each.mode == "streamed", each.name)
    check_row(each.case, row)


def check_client(case: Case, door: str, got: Got) -> None:
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
