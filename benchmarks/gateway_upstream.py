"""A mock backend, as cheap as a server in Python can be, so that what is measured is what stands in front of it.

``python benchmarks/gateway_upstream.py PORT``. ``POST /v1/chat/completions`` answers at once: whole, or with
``"stream": true`` as 32 events. The model's name asks for other streams: ``paced-N-MS`` for N events, MS milliseconds
apart, each with the time (monotonic, in ns) at which it was sent as its text; ``endless`` for events as fast as they
are taken, until the connection closes. ``GET`` on any path answers with a list of models.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import uvloop

EVENTS = 32
_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
_USAGE = {"prompt_tokens": 25, "completion_tokens": EVENTS, "total_tokens": 25 + EVENTS}


def _whole(body: bytes) -> bytes:
    return _HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    event = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event | more, separators=(",", ":")).encode() + b"\n\n"


ANSWER = _whole(
    json.dumps(
        {
            "id": "chatcmpl-mock",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "A fixed answer, about as long as a short reply."},
                }
            ],
            "usage": _USAGE,
        }
    ).encode()
)
MODELS = _whole(b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"mock"}]}')
STREAM_HEAD = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": _USAGE}, separators=(",", ":")).encode() + b"\n\n"
END = _chunk(USAGE_EVENT) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM = b"".join(
    [STREAM_HEAD]
    + [_chunk(_event({"content": f"token{number} "})) for number in range(EVENTS)]
    + [_chunk(_event({}, "stop")), END]
)


class Mock(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment] - uvloop's transports are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = re.search(rb"content-length:\s*(\d+)", head)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            body, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post"):
            self.transport.write(MODELS)
            return
        found = _MODEL.search(body)
        kind, *numbers = (found[1].decode() if found else "").split("-")
        if not _STREAM.search(body):
            self.transport.write(ANSWER)
        elif kind == "paced":
            self._task = asyncio.create_task(self._paced(int(numbers[0]), int(numbers[1]) / 1000))
        elif kind == "endless":
            self._task = asyncio.create_task(self._endless())
        else:
            self.transport.write(STREAM)

    async def _paced(self, count: int, interval_s: float) -> None:
        self.transport.write(STREAM_HEAD)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(count):
            await asyncio.sleep(began + number * interval_s - loop.time())
            self.transport.write(_chunk(_event({"content": str(time.monotonic_ns())})))
        self.transport.write(_chunk(_event({}, "stop")) + END)

    async def _endless(self) -> None:
        self.transport.write(STREAM_HEAD)
        piece = _chunk(_event({"content": "x" * 400})) * 16
        while not self.transport.is_closing():
            await self._writable.wait()
            self.transport.write(piece)
            await asyncio.sleep(0)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
