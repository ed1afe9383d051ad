"""One open WebSocket: chat completions one after another, each streamed as the events of an event stream would be.

The client sends a chat completion request, or ``{"type": "cancel"}``, or ``{"type": "ping"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
import structlog
from litestar.types import Receive, Send

from gateway.http.client import Client, ClientGone
from gateway.http.inference import FAREWELL_S, stopping
from gateway.http.websocket_exchange import ChatExchange, Frames
from gateway.pipeline import Pipeline
from worker.protocol.errors import bad_request

_DONE: Final = 1000
_TOO_SLOW: Final = 1008
_FAILED: Final = 1011
_RESTARTS: Final = 1012
"""Codes: RFC 6455, section 7.4, and IANA's registry."""
_PONG: Final = b'{"type":"pong"}'
_CANCELLED: Final = b'{"type":"cancelled"}'

_log = structlog.get_logger("gateway.request")


class _Typed(msgspec.Struct):
    type: msgspec.Raw = msgspec.Raw(b"null")


_typed_decoder = msgspec.json.Decoder(_Typed)


class Session:
    """An open connection. One task reads what the client sends, one runs what it asked for."""

    def __init__(
        self,
        pipeline: Pipeline,
        client: Client,
        key: str | None,
        receive: Receive,
        send: Send,
        *,
        path: str,
        idle_s: float,
        heads: bool,
        stop: asyncio.Event | None,
    ) -> None:
        """``client``: who opened it, by the headers of the handshake. ``idle_s``: it is closed after so long without
        a message or a request that runs. ``heads``: whether it is told what an answer's head would say. ``stop`` is
        set when the server wants to end."""
        self._pipeline = pipeline
        self._client = client
        self._key = key
        self._receive = receive
        self._frames = Frames(send)
        self._path = path
        self._idle_s = idle_s
        self._heads = heads
        self._stop = stop or asyncio.Event()
        self._running: ChatExchange | None = None
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        """How to close."""
        self._idle: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Returns when the connection is over; raises nothing, whatever comes."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read(group)), group.create_task(self._end_on_stop())]
                self._rest()
                code, reason = await self._over
                if self._running is not None:
                    self._running.leave()
                for task in tasks:
                    task.cancel()
        except asyncio.CancelledError:
            # The server stops and wants this task to end, which it does. What ran has said its last words.
            code, reason = _RESTARTS, "the gateway restarts"
        except Exception:
            _log.exception("websocket_crashed")
            code, reason = _FAILED, "the gateway failed"
        if self._idle is not None:
            self._idle.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._frames.close(code, reason)

    def _finish(self, code: int, reason: str = "") -> None:
        if not self._over.done():
            self._over.set_result((code, reason))

    async def _end_on_stop(self) -> None:
        await self._stop.wait()
        if self._running is not None:
            await self._running.wait()
        self._finish(_RESTARTS, "the gateway restarts")

    async def _read(self, group: asyncio.TaskGroup) -> None:
        with contextlib.suppress(ClientGone):
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._take(message, group)
                self._rest()
        self._finish(_DONE)

    async def _take(self, message: Any, group: asyncio.TaskGroup) -> None:
        """Raises ClientGone."""
        frames, text = self._frames, message.get("text")
        if text is None:
            await frames.error(bad_request("Send text messages; this one was binary.", code="binary_message"))
            return
        raw = text.encode()
        kind = _type_of(raw)
        if kind == "ping":
            await frames.send(_PONG)
        elif kind == "cancel":
            if self._running is not None:
                self._running.leave()
                await self._running.wait()
                await frames.send(_CANCELLED)
        elif kind is not None:
            told = "A message is a chat completion request, which has no 'type', or of the type 'cancel' or 'ping'."
            await frames.error(bad_request(told, param="type", code="unknown_message_type"))
        elif self._running is not None:
            told = "A request still runs on this connection. Wait for its end, cancel it, or open another connection."
            await frames.error(bad_request(told, code="request_in_progress"))
        elif self._stop.is_set():
            await frames.error(stopping())
        else:
            self._running = ChatExchange(
                self._pipeline, self._client, self._key, frames, raw, path=self._path, heads=self._heads
            )
            self._running.start(group, ended=self._ended, too_slow=self._too_slow)

    def _ended(self) -> None:
        self._running = None
        self._rest()

    def _too_slow(self) -> None:
        self._finish(_TOO_SLOW, "the answer was not read in time")

    def _rest(self) -> None:
        """Nothing is heard of the client from now on."""
        if self._idle is not None:
            self._idle.cancel()
        if self._running is None and not self._over.done():
            reason = f"nothing was asked for {self._idle_s:g} s"
            self._idle = self._loop.call_later(self._idle_s, self._finish, _DONE, reason)


def _type_of(raw: bytes) -> str | None:
    """None if it has none; empty if that is no text."""
    try:
        found = bytes(_typed_decoder.decode(raw).type)
        value = None if found == b"null" else msgspec.json.decode(found)
    except (msgspec.DecodeError, RecursionError):
        # The request's own reader says what is wrong with it.
        return None
    return value if value is None or isinstance(value, str) else ""
