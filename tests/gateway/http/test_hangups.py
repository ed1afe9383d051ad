"""Callers that leave at any moment, in any way: the backend sees the close, one row is written, the slot is free."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from gateway.routing.route import Route
from tests.gateway.backends.relay_support import black_hole
from tests.gateway.tenants.support import ACTOR, concurrent
from worker.protocol.fleet import WorkerRecord

PATH = "/v1/chat/completions"
WAYS = ("close", "reset", "half-close", "connection: close")
USED = {
    "connecting": (0, 0),
    "before the head": (0, 0),
    "before the first event": (0, 0),
    "in the prompt": (5, 0),
    "in the middle": (9, 4),
    "at the second backend": (0, 0),
}
"""By phase, the tokens of prompt and output that the backend told of."""
CASES = {f"{index}": case for index, case in enumerate(itertools.product(USED, (True, False), WAYS))}


class Caller:
    """One request on a socket of its own."""

    def __init__(self, gateway: Any, name: str, phase: str, streamed: bool, way: str) -> None:
        self._gateway = gateway
        self._name = name
        self._way = way
        model = {"connecting": "nowhere", "at the second backend": "second"}.get(phase, "m")
        self._ask = {"model": model, "stream": streamed, "messages": [{"role": "user", "content": phase}], "user": name}
        self.left_at = 0.0

    async def call(self) -> None:
        body = json.dumps(self._ask).encode()
        ending = "connection: close\r\n" if self._way == "connection: close" else ""
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._gateway.key}\r\n{ending}"
        _, self._writer = await asyncio.open_connection("127.0.0.1", self._gateway.port)
        head += f"x-request-id: {self._name}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._writer.drain()

    def leave(self) -> None:
        self.left_at = asyncio.get_running_loop().time()
        if self._way == "reset":
            self._writer.transport.abort()
        elif self._way == "half-close":
            self._writer.write_eof()
        else:
            self._writer.close()

    def close(self) -> None:
        self._writer.close()


async def all_of(conditions: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not conditions():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def script(began: set[str], closed: dict[str, float]) -> Callable[[Any], Awaitable[None]]:
    """A backend that gets as far as its request says and then waits to be left. Keeps when that was."""

    async def converse(c: Any) -> None:
        phase = c.body["messages"][0]["content"]
        if phase == "quick":
            await c.whole()
            return
        prompt, output = USED[phase]
        if phase in ("before the first event", "in the prompt", "in the middle"):
            await c.begin()
        if prompt:
            await c.meter(prompt, output)
        if output and c.body["stream"]:
            await c.token("Par", output)
        began.add(c.body["user"])
        await c.wait_closed_by_peer(within_s=20)
        closed[c.body["user"]] = asyncio.get_running_loop().time()

    return converse


async def test_a_caller_may_leave_at_any_moment_in_any_way(start_gateway: Any, upstream: Any) -> None:
    began: set[str] = set()
    closed: dict[str, float] = {}

    async def fails(c: Any) -> None:
        await c.status(500, b"")

    generates, failing = await upstream(script(began, closed)), await upstream(fails)
    async with start_gateway(limits=[concurrent(len(CASES))]) as gateway, black_hole() as nowhere:
        for name in ("nowhere", "second"):
            await gateway.catalog.create_pool(ACTOR, name)
            await gateway.create_route(Route(name, name, "m", 1000, 50, 500, 30.0))
            await gateway.set_price(name, "1", "2")
        for worker, pool, url in (
            ("hole", "nowhere", nowhere),
            ("failing", "second", failing.url),
            ("later", "second", generates.url),
        ):
            await gateway.registry.register(
                WorkerRecord(worker_id=worker, pool=pool, base_url=url, model="m", context_length=1000)
            )
            gateway.registered.add(worker)
        await gateway.register(generates)

        callers = {name: Caller(gateway, name, *case) for name, case in CASES.items()}
        for caller in callers.values():
            await caller.call()
        at_backends = {name for name, (phase, *_) in CASES.items() if phase != "connecting"}
        await all_of(lambda: began == at_backends)
        await asyncio.sleep(0.1)
        assert not closed
        for caller in callers.values():
            caller.leave()
        await all_of(lambda: closed.keys() == at_backends)
        late = {CASES[name]: closed[name] - callers[name].left_at for name in at_backends}
        assert max(late.values()) < 1.0, late

        rows = await gateway.rows(len(CASES), within_s=10.0)
        assert {row.client_request_id for row in rows} == CASES.keys()
        for row in rows:
            phase, streamed, _ = case = CASES[row.client_request_id]
            assert (row.status, row.streamed) == ("aborted", streamed), case
            assert (row.prompt_tokens, row.completion_tokens) == USED[phase], case
            assert row.charged_nano_usd == row.prompt_tokens * 1000 + row.completion_tokens * 2000, case
            if phase == "at the second backend":
                assert row.backend == "later", case
        for caller in callers.values():
            caller.close()

        # All slots are free again.
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {gateway.key}"}, timeout=20) as client:
            ask = {"model": "m", "messages": [{"role": "user", "content": "quick"}]}
            answers = await asyncio.gather(*(client.post(gateway.url + PATH, json=ask) for _ in CASES))
        assert {answer.status_code for answer in answers} == {200}


async def test_a_caller_that_leaves_just_as_its_answer_ends_has_one_row(gateway: Any, upstream: Any) -> None:
    """Whichever is seen first."""
    go_on = asyncio.Event()

    async def answer(c: Any) -> None:
        await go_on.wait()
        if c.body["stream"]:
            await c.begin()
            await c.token("Paris", 3)
            await c.done()
        else:
            await c.whole()

    server = await upstream(answer)
    await gateway.register(server)
    callers = [Caller(gateway, way, "any", streamed, way) for streamed in (True, False) for way in WAYS]
    for caller in callers:
        await caller.call()
    await all_of(lambda: len(server.seen) == len(callers))
    go_on.set()
    for caller in callers:
        caller.leave()
    rows = await gateway.rows(len(callers))
    assert {row.status for row in rows} <= {"ok", "aborted"}
    for caller in callers:
        caller.close()
