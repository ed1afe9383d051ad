"""Clients for ``benchmarks/gateway.py``: plain sockets, so that they cost little beside what they measure."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

_STAMP = re.compile(rb'"content":\s?"(\d+)"')


@dataclass(frozen=True, slots=True)
class Ask:
    port: int
    model: str
    key: str | None = None
    stream: bool = False
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Write one sentence about the weather in Paris in spring, please."},
                ],
                "max_tokens": 64,
                "temperature": 0.7,
                "stream": self.stream,
            }
        ).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{self.port}"]
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Outcome:
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    failed: int = 0
    elapsed_s: float = 0.0

    @property
    def done(self) -> int:
        return len(self.latencies_s)

    def quantile_ms(self, share: float) -> float:
        return quantile(self.latencies_s, share) * 1000


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")


class _Repeating(asyncio.Protocol):
    """Asks again as soon as it has its answer."""

    def __init__(self, request: bytes, outcome: Outcome, until: float, over: asyncio.Future[None]) -> None:
        self._request, self._outcome, self._until, self._over = request, outcome, until, over
        self._buffer = bytearray()
        self._left = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] - uvloop's are no subclasses
        self._send()

    def _send(self) -> None:
        self._buffer.clear()
        self._left = -1
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._left < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            if b" 200" not in head[:13]:
                self._outcome.failed += 1
                self._end()
                return
            length = re.search(rb"content-length:\s*(\d+)", head)
            self._left = end + 4 + int(length[1]) if length else 0
        whole = len(self._buffer) >= self._left if self._left else self._buffer.endswith(b"0\r\n\r\n")
        if not whole:
            return
        now = time.perf_counter()
        self._outcome.latencies_s.append(now - self._began)
        if now >= self._until:
            self._end()
        else:
            self._send()

    def _end(self) -> None:
        self._transport.close()
        if not self._over.done():
            self._over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._outcome.failed += 1
            self._over.set_result(None)


async def repeat(ask: Ask, concurrent: int, seconds: float) -> Outcome:
    """``concurrent`` clients that ask again and again."""
    loop, outcome, request = asyncio.get_running_loop(), Outcome(), ask.encode()
    began = time.perf_counter()
    overs = [loop.create_future() for _ in range(concurrent)]
    for over in overs:
        await loop.create_connection(
            lambda over=over: _Repeating(request, outcome, began + seconds, over), "127.0.0.1", ask.port
        )
    await asyncio.gather(*overs)
    outcome.elapsed_s = time.perf_counter() - began
    return outcome


@dataclass
class Paced:
    """What many streams at a steady pace came to."""

    whole: int = 0
    failed: int = 0
    added_gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between two events of a stream: how much longer for the client than for the backend."""
    delays_s: array[float] = field(default_factory=lambda: array("d"))
    """From the backend's sending to the client's reading."""


class _Listening(asyncio.Protocol):
    def __init__(self, request: bytes, paced: Paced, over: asyncio.Future[None]) -> None:
        self._request, self._paced, self._over = request, paced, over
        self._rest = b""
        self._last: tuple[int, int] | None = None
        self._good = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] - uvloop's are no subclasses
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            stamp = _STAMP.search(line)
            if stamp is not None:
                sent = int(stamp[1])
                self._paced.delays_s.append((now - sent) / 1e9)
                if self._last is not None:
                    self._paced.added_gaps_s.append(((now - self._last[1]) - (sent - self._last[0])) / 1e9)
                self._last = (sent, now)
            elif b"[DONE]" in line:
                self._good = True
        if self._good and b"0\r" in lines:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._over.done():
            return
        if self._good:
            self._paced.whole += 1
        else:
            self._paced.failed += 1
        self._over.set_result(None)
        self._transport.close()


async def listen(ask: Ask, streams: int, ramp_s: float, limit_s: float) -> Paced:
    """``streams`` at once, begun over ``ramp_s``; what has not ended ``limit_s`` after that has failed."""
    loop, paced, request = asyncio.get_running_loop(), Paced(), ask.encode()
    overs: list[asyncio.Future[None]] = []
    for number in range(streams):
        over = loop.create_future()
        overs.append(over)
        try:
            await loop.create_connection(lambda over=over: _Listening(request, paced, over), "127.0.0.1", ask.port)
        except OSError:
            paced.failed += 1
            over.set_result(None)
        if number % 20 == 19:
            await asyncio.sleep(ramp_s * 20 / streams)
    _, late = await asyncio.wait(overs, timeout=limit_s)
    paced.failed += len(late)
    return paced


async def read_slowly(ask: Ask, seconds: float, bytes_per_s: int = 1) -> int:
    """Read an answer at that rate; bytes that came."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else the kernel takes megabytes for the client
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", ask.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1)
    taken = 0
    try:
        writer.write(ask.encode())
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            taken += len(await reader.read(bytes_per_s))
            await asyncio.sleep(1)
    finally:
        writer.transport.abort()
    return taken
