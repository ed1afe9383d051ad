"""A client of the WebSocket for chats, and what its backend says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

PATH = "/v1/realtime-chat"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Capital of France?"}]}


def address(gateway: Any) -> str:
    return f"ws://127.0.0.1:{gateway.port}{PATH}"


@contextlib.asynccontextmanager
async def opened(gateway: Any, *, key: str | None = None, **headers: str) -> AsyncIterator[ClientConnection]:
    told = {"authorization": f"Bearer {key or gateway.key}"} | {n.replace("_", "-"): v for n, v in headers.items()}
    async with asyncio.timeout(20), connect(address(gateway), additional_headers=told) as connection:
        yield connection


async def ask(connection: ClientConnection, body: Any = ASK) -> None:
    await connection.send(body if isinstance(body, str) else json.dumps(body))


async def answer(connection: ClientConnection) -> list[Any]:
    """All frames up to ``[DONE]`` or an error."""
    frames: list[Any] = []
    while True:
        text = await connection.recv()
        frames.append(text if text == "[DONE]" else json.loads(text))
        if text == "[DONE]" or "error" in frames[-1]:
            return frames


def code_of(frame: Any) -> str:
    assert set(frame) == {"error"}
    assert set(frame["error"]) == {"message", "type", "param", "code"}
    return str(frame["error"]["code"])


async def closing(connection: ClientConnection) -> tuple[int, str]:
    try:
        while True:
            await connection.recv()
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return closed.rcvd.code, closed.rcvd.reason


async def paris(c: Any) -> None:
    await c.begin()
    await c.token("Par", 1)
    await c.token("is — 日本", 2)
    await c.done()


class Paused:
    """A backend that says a token and waits."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.closed_after_s: list[float] = []

    async def __call__(self, c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        closed = asyncio.ensure_future(c.wait_closed_by_peer(10))
        go = asyncio.ensure_future(self.go.wait())
        await asyncio.wait([closed, go], return_when=asyncio.FIRST_COMPLETED)
        go.cancel()
        if closed.done():
            self.closed_after_s.append(closed.result())
            return
        closed.cancel()
        await c.token("is", 2)
        await c.done()


async def refusal(gateway: Any, **arguments: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(address(gateway), **arguments):
            pass
    response = caught.value.response
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = json.loads(response.body or b"")["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error
