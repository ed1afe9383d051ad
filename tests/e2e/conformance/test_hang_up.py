"""Callers of every door leave at every moment: within a second the backend sees it; one row each, and the slot is free.

Chats before our own worker are tried in more ways in ``tests/gateway/http/test_hangups.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import pytest_asyncio
import websockets
from sqlalchemy import select

from gateway.db.tables import usage_events
from gateway.settings import Settings
from tests.e2e.conformance import hostile_backend as says
from tests.e2e.conformance.targets import Declared, declare, http_of
from tests.gateway.conftest import Conversation, Gateway, Upstream, running_gateway
from tests.gateway.tenants.support import concurrent

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATHS: Final = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "websocket": "/v1/realtime-chat",
}
DOORS: Final = (
    *(("vllm", door) for door in PATHS),
    *(("anthropic", door) for door in ("chat", "messages", "responses", "websocket")),
)
"""Behind each a backend of that brand."""
PHASES: Final = {
    True: ("before the head", "before a token", "in the middle"),
    False: ("before the head", "in the body"),
}
"""Of a stream, and of a whole answer."""
_NUMBER = re.compile(rb"\[\[([0-9]+)\]\]")


@dataclass(frozen=True)
class Case:
    number: int
    brand: str
    door: str
    streamed: bool
    phase: str

    @property
    def ask(self) -> dict[str, Any]:
        said, fields = f"[[{self.number}]]", {"model": self.brand}
        messages = [{"role": "user", "content": said}]
        if self.door == "embeddings":
            return fields | {"input": said}
        if self.door == "completions":
            return fields | {"prompt": said, "stream": self.streamed}
        if self.door == "responses":
            return fields | {"input": said, "stream": self.streamed}
        return fields | {"messages": messages, "max_tokens": 20, "stream": self.streamed}


CASES: Final = [
    Case(number, *case)
    for number, case in enumerate(
        (brand, door, streamed, phase)
        for brand, door in DOORS
        for streamed in PHASES
        for phase in PHASES[streamed]
        if not (streamed and door == "embeddings") and (streamed or door != "websocket")
    )
]
BEHIND_THE_LAST: Final = len(CASES)
"""A request of this number is answered at once."""


class Backend:
    """Gets as far as the case says and waits to be left."""

    def __init__(self) -> None:
        self.began: set[int] = set()
        self.closed: dict[int, float] = {}

    async def converse(self, c: Conversation) -> None:
        found = _NUMBER.search(c.raw)
        if found is None:  # a probe
            await says.answers(200)(c, asyncio.Event())
            return
        number = int(found[1])
        if number == BEHIND_THE_LAST:
            await says.answers(200, says.completion())(c, asyncio.Event())
            return
        case = CASES[number]
        if case.phase == "in the body":
            await c.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n{"id":"1"')
        elif case.phase != "before the head":
            await c.begin()
            for piece in self.pieces(case):
                await c.send_piece(piece)
        self.began.add(number)
        await c.wait_closed_by_peer(within_s=20)
        self.closed[number] = asyncio.get_running_loop().time()

    def pieces(self, case: Case) -> tuple[bytes, ...]:
        if case.brand == "anthropic":
            said: tuple[bytes, ...] = (says.START, says.BLOCK, says.block_delta("Par"))
        elif case.door == "completions":
            choice = {"index": 0, "text": "Par", "finish_reason": None}
            said = (b": thinking\n\n", says.chunk({}, choices=[choice]))
        else:
            said = (says.ROLE, says.PAR)
        return said if case.phase == "in the middle" else said[:1]


class Caller:
    def __init__(self, gateway: Gateway, case: Case) -> None:
        self._gateway = gateway
        self._case = case
        self._connection: Any = None
        """A StreamWriter, or a WebSocket."""
        self.left_at = 0.0

    async def call(self) -> None:
        case, gateway = self._case, self._gateway
        body = json.dumps(case.ask)
        if case.door == "websocket":
            address = f"{gateway.url.replace('http', 'ws', 1)}{PATHS[case.door]}"
            headers = {"authorization": f"Bearer {gateway.key}"}
            self._connection = await websockets.connect(address, additional_headers=headers)
            await self._connection.send(body)
            return
        head = f"POST {PATHS[case.door]} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
        _, self._connection = await asyncio.open_connection("127.0.0.1", gateway.port)
        self._connection.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    def leave(self) -> None:
        self.left_at = asyncio.get_running_loop().time()
        if self._case.number % 2:
            self._connection.transport.abort()
        else:
            self._connection.transport.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[tuple[Backend, str]]:
    backend = Backend()
    upstream = Upstream([backend.converse])
    await upstream.start()
    yield backend, upstream.url
    await upstream.stop()
    assert upstream.failures == []


async def all_of(numbers: set[int], found: Any) -> float:
    """Wait for them; the longest time, in seconds, for which the event loop was held up meanwhile."""
    loop, held_up = asyncio.get_running_loop(), 0.0
    try:
        async with asyncio.timeout(20):
            while set(found) != numbers:
                before = loop.time()
                await asyncio.sleep(0.01)
                held_up = max(held_up, loop.time() - before - 0.01)
    except TimeoutError:
        missing = [CASES[number] for number in numbers.difference(found)]
        raise AssertionError(f"not so: {missing}") from None
    return held_up


async def rows_of(gateway: Gateway, count: int) -> list[Any]:
    async with asyncio.timeout(20):
        while True:
            async with gateway.engine.connect() as connection:
                rows = list(await connection.execute(select(usage_events)))
            if len(rows) >= count:
                return rows
            await asyncio.sleep(0.02)


async def test_whoever_leaves_at_whatever_moment(gateway_settings: Settings, backend: tuple[Backend, str]) -> None:
    scripted, url = backend
    await declare(gateway_settings.database_url, [Declared(brand, brand, url) for brand in ("vllm", "anthropic")])
    numbers = {case.number for case in CASES}
    async with running_gateway(gateway_settings, limits=[concurrent(len(CASES))]) as gateway:
        callers = {case.number: Caller(gateway, case) for case in CASES}
        for caller in callers.values():
            await caller.call()
        await all_of(numbers, scripted.began)
        await asyncio.sleep(0.2)
        assert not scripted.closed
        for caller in callers.values():
            caller.leave()
        held_up = await all_of(numbers, scripted.closed)
        late = {CASES[number]: at - callers[number].left_at for number, at in scripted.closed.items()}
        assert max(late.values()) < 1.0 + held_up, late

        rows = await rows_of(gateway, len(CASES))
        found = sorted((row.route, row.api, row.streamed, row.status, row.completion_tokens) for row in rows)
        apis = {"chat": "chat_completions", "websocket": "chat_completions"}
        assert found == sorted(
            (case.brand, apis.get(case.door, case.door), case.streamed, "aborted", said(case)) for case in CASES
        )
        # All slots are free again, so that as many can be served at once.
        async with http_of(gateway) as client:
            ask = {"model": "vllm", "messages": [{"role": "user", "content": f"[[{BEHIND_THE_LAST}]]"}]}
            answers = await asyncio.gather(*(client.post(PATHS["chat"], json=ask) for _ in CASES))
        assert {answer.status_code for answer in answers} == {200}


def said(case: Case) -> int:
    """Tokens of output that the backend had told of, or said."""
    if case.phase == "in the middle":
        return 1
    return 1 if case.brand == "anthropic" and case.phase == "before a token" else 0
