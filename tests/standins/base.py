"""Scripted servers that send what real ones send: the same words from each, every brand in its own way.

Which answer a request gets is its scenario: the stand-in's attribute ``scenario``, else a marker as ``[[tools]]`` in
the request, else ``tools`` for a request with tools whose last message is a user's, else ``text``. Answers depend on
nothing but the request, so that a test can compare what a client got with ``sent``.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

_MARKER = re.compile(rb"\[\[([a-z_]+)\]\]")
CREATED = 1_700_000_000
KEY = "backend-key-0123456789abcdef"
"""What every stand-in takes for its key, where one is declared for it."""
PIECES = ("Héllo", ", ", "世界", " 😀", '\n"end"')
"""What is said in the scenario ``text``, a token each."""
TEXT = "".join(PIECES)
REASONING = ("Let me", " think", " of 7.")
PROMPT_TOKENS = 9
CACHED_TOKENS = 4


@dataclass(frozen=True)
class Call:
    """A tool's call, its arguments in the pieces that they come in."""

    id: str
    name: str
    arguments: tuple[str, ...]


CALLS = (
    Call("call_a1B2c3D4", "get_weather", ('{"city"', ': "Zür', 'ich"}')),
    Call("call_e5F6g7H8", "get_time", ('{"zone":', ' "CET"}')),
)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    """Lower-case names."""
    raw: bytes = b""

    @property
    def body(self) -> dict[str, Any]:
        decoded = json.loads(self.raw or b"{}")
        assert isinstance(decoded, dict)
        return decoded


@dataclass
class Reply:
    """``pieces`` go out one by one in chunks, ``body`` at once. ``cut``: the connection breaks behind them."""

    status: int = 200
    body: bytes | None = None
    pieces: list[bytes] = field(default_factory=list)
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False

    @property
    def events(self) -> list[bytes]:
        """Data of the pieces that are events, ``[DONE]`` among them."""
        found = []
        for piece in self.pieces:
            lines = [line for line in piece.splitlines() if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(line.removeprefix(b"data:").removeprefix(b" ") for line in lines))
        return found


class StandIn:
    """``async with VLLM() as backend:``, then declare ``backend.url``; ``needs_key``: with ``KEY`` for its secret."""

    brand: ClassVar[str]
    base_path: ClassVar[str] = ""
    """What a declared base URL has behind the host."""

    def __init__(self, *, scenario: str | None = None, needs_key: bool = False, pause_s: float = 0.0) -> None:
        self.scenario = scenario
        self.needs_key = needs_key
        self.pause_s = pause_s
        """Between pieces."""
        self.seen: list[Request] = []
        self.sent: list[Reply] = []
        """The reply to each of ``seen``."""
        self.closed_early = 0
        """Replies that the client did not wait for."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._talking: set[asyncio.Task[None]] = set()

    def answer(self, request: Request, scenario: str) -> Reply:
        raise NotImplementedError

    def scenario_of(self, request: Request) -> str:
        if self.scenario is not None:
            return self.scenario
        if found := _MARKER.findall(request.raw):
            return str(found[-1].decode())
        messages = request.body.get("messages")
        asks = isinstance(messages, list) and messages and messages[-1].get("role") == "user"
        return "tools" if asks and request.body.get("tools") else "text"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}{self.base_path}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._talking:
            task.cancel()
        await asyncio.gather(*self._talking, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        try:
            while True:
                request = await _read(reader)
                self.seen.append(request)
                reply = self.answer(request, self.scenario_of(request))
                self.sent.append(reply)
                await self._write(reply, writer)
                if reply.cut:
                    writer.transport.abort()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._talking.discard(task)
            writer.close()

    async def _write(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        headers = {"content-type": reply.media_type, **reply.headers}
        if reply.body is not None:
            headers["content-length"] = str(len(reply.body))
        else:
            headers["transfer-encoding"] = "chunked"
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} X\r\n{head}\r\n".encode("latin-1") + (reply.body or b""))
        await writer.drain()
        try:
            for piece in reply.pieces:
                await asyncio.sleep(self.pause_s)
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
        except ConnectionError:
            self.closed_early += 1
            raise
        if reply.body is None and not reply.cut:
            writer.write(b"0\r\n\r\n")
            await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


def compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """As Pydantic and Go word it: without spaces, wide characters as they are."""
    return b"data: " + compact(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
