"""A server that knows nothing of HTTP: its script reads and writes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.backends.http_answer import Answer
from gateway.backends.http_connection import Connection
from gateway.backends.transport import Reply, Transport

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """Runs ``script`` for each connection, which its end closes. A client that goes away is no failure."""

    script: Script
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    connections: int = 0
    ended: int = 0
    """Scripts that came to their end."""
    port: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _talking: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> RawServer:
        self._server = await asyncio.start_server(self._connected, self.host, 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._talking:
                task.cancel()
            await asyncio.gather(*self._talking, return_exceptions=True)
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        try:
            await self.script(reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as fault:
            self.failures.append(fault)
        finally:
            self.ended += 1
            self._talking.discard(task)
            writer.transport.abort() if writer.transport.is_closing() else writer.close()


class Peer:
    """A server of one connection in a thread of its own, which acts while the event loop stands still.

    It reads a head and waits for its turn before each of ``acts``; after the last it closes, though it left something
    unread.
    """

    def __init__(self, *acts: bytes) -> None:
        self._acts = acts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def act(self) -> None:
        """Blocks the event loop until what it did has come to this end."""
        self._turn.release()
        assert self._done.acquire(timeout=5.0)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with self._listener, connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1000)
            for number, act in enumerate(self._acts):
                if number:
                    self._done.release()
                self._turn.acquire()
                connection.sendall(act)
        self._done.release()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._turn.release(100)
        with contextlib.suppress(OSError):
            self._listener.close()
        self._thread.join(5.0)


def says(answer: bytes) -> Script:
    """Reads a request, answers it so, and closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)
        await writer.drain()

    return script


def answers(*replies: bytes) -> Script:
    """Answers each request of a connection by the next of ``replies``, the last one for ever."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while True:
            await request(reader)
            writer.write(replies[min(number, len(replies) - 1)])
            number += 1

    return script


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length: ")
    return head, await reader.readexactly(int(length.split(b"\r\n")[0] or 0))


async def gone(reader: asyncio.StreamReader) -> None:
    """Until the peer has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass


async def asked(transport: Transport, url: str, body: bytes = b"{}", *, connect_s: float = 5.0) -> Reply:
    return await transport.post(url, headers={"a": "b"}, body=body, connect_s=connect_s)


async def whole(reply: Reply) -> bytes:
    """The body. Raises BackendFault."""
    parts = []
    while piece := await reply.read_some():
        parts.append(piece)
    return b"".join(parts)


def left_over() -> list[object]:
    """Answers and connections that are still there."""
    return [one for one in gc.get_objects() if type(one) in (Answer, Connection, Reply)]
