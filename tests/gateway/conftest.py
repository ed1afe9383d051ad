"""A backend on a raw socket that does what a test's script says, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from worker.protocol.sse import DONE, encode_event
from worker.protocol.usage import MeterReading, encode_meter

EVENT_STREAM = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


def chunk_event(text: str | None, *, finish: str | None = None, model: str = "m", **extra: Any) -> bytes:
    """Data of one streamed event."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]} | extra,
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()


def whole_event(text: str = "Paris", *, model: str = "m", prompt: int = 9, completion: int = 3) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
    ).encode()


@dataclass
class Conversation:
    """One request that the backend got, and the means to answer it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: str
    headers: dict[str, str]
    raw: bytes
    ending: str
    """Header that says what becomes of the connection after the answer."""

    @property
    def body(self) -> dict[str, Any]:
        decoded = json.loads(self.raw)
        assert isinstance(decoded, dict)
        return decoded

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self) -> None:
        await self.send(f"{EVENT_STREAM}{self.ending}\r\n".encode())

    async def send_piece(self, data: bytes) -> None:
        """One chunk of the body."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def meter(self, prompt: int, completion: int) -> None:
        await self.send_piece(encode_meter(MeterReading(prompt, completion)))

    async def event(self, data: bytes) -> None:
        await self.send_piece(encode_event(data))

    async def token(self, text: str, completion: int, *, prompt: int = 9, model: str = "m") -> None:
        """An event with running usage before it, as our worker sends it."""
        reading = encode_meter(MeterReading(prompt, completion))
        await self.send_piece(reading + encode_event(chunk_event(text, model=model)))

    async def done(self) -> None:
        await self.send_piece(encode_event(DONE))
        await self.send(b"0\r\n\r\n")

    async def whole(self, data: bytes | None = None, *, prompt: int = 9, completion: int = 3) -> None:
        await self.begin()
        await self.meter(prompt, completion)
        await self.event(data or whole_event(prompt=prompt, completion=completion))
        await self.done()

    async def status(self, status: int, body: bytes, *, media_type: str = "application/json", more: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n{self.ending}{more}\r\n"
        await self.send(head.encode() + body)

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def wait_closed_by_peer(self, within_s: float = 5.0) -> float:
        """Seconds until the gateway closed the connection."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(within_s):
            try:
                while await self.reader.read(4096):
                    pass
            except ConnectionError:
                pass
        return loop.time() - began


Script = Callable[[Conversation], Awaitable[None]]


@dataclass
class Upstream:
    """Answers the n-th request by the n-th script, and later ones by the last. A script's end closes the connection
    unless it sets ``keep_alive``."""

    scripts: list[Script]
    keep_alive: bool = False
    seen: list[Conversation] = field(default_factory=list)
    connections: int = 0
    url: str = ""
    port: int = 0
    failures: list[BaseException] = field(default_factory=list)
    server: asyncio.Server | None = None
    talking: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            for task in self.talking:
                task.cancel()
            await asyncio.gather(*self.talking, return_exceptions=True)
            await self.server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.talking.add(task)
        ending = "" if self.keep_alive else "connection: close\r\n"
        try:
            while True:
                try:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                conversation = Conversation(reader, writer, first, headers, raw, ending)
                self.seen.append(conversation)
                script = self.scripts[min(len(self.seen), len(self.scripts)) - 1]
                try:
                    await script(conversation)
                except ConnectionError:
                    return
                except Exception as fault:
                    self.failures.append(fault)
                    return
                if not self.keep_alive:
                    return
        finally:
            self.talking.discard(task)
            writer.close()


UpstreamFactory = Callable[..., Awaitable[Upstream]]


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamFactory]:
    """``await upstream(script, ...)`` starts a backend; what a script raised fails the test at its end."""
    started: list[Upstream] = []

    async def start(*scripts: Script, keep_alive: bool = False) -> Upstream:
        server = Upstream(list(scripts), keep_alive)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()
    for server in started:
        if server.failures:
            raise server.failures[0]
