"""Sends one answer over ASGI, and stops the engine as soon as the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

import structlog
from litestar.types import Receive, Scope, Send

from worker.protocol import headers
from worker.protocol.errors import ApiError, server_error
from worker.protocol.sse import MEDIA_TYPE, encode_comment, encode_event
from worker.server.answer import Writer, events, whole_body
from worker.server.call import Call
from worker.server.choices import Answer
from worker.server.door import Door
from worker.server.metrics import Outcome, RequestMetrics

KEEPALIVE_S: Final = 10.0
_KEEPALIVE: Final = encode_comment(b"keep-alive")

log = structlog.get_logger("penstock.worker")


class Exchange(Protocol):
    """One valid request, and how its answer is written."""

    endpoint: str
    """Its name in log and metrics."""
    stream: bool
    """Whether the client asked for a stream."""

    async def start(self, metrics: RequestMetrics) -> Answer:
        """Hand it to the engine. Raises ApiError; then nothing runs."""
        ...

    def writer(self) -> Writer: ...


class Responder:
    """An ASGI application that answers one request.

    An event stream's headers leave with its first event, so that whatever fails before it has a status of its own; a
    metered one's with the first chunk of the prompt, for the meter runs from there. A wait longer than ``keepalive_s``
    seconds is filled with comments. Raises ApiError if nothing was sent yet.
    """

    def __init__(
        self,
        exchange: Exchange,
        call: Call,
        door: Door,
        metrics: RequestMetrics,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._exchange = exchange
        self._call = call
        self._door = door
        self._metrics = metrics
        self._keepalive_s = keepalive_s
        self._streams = exchange.stream or call.metered
        self._answer: Answer | None = None
        self._started = False
        self._outcome: Outcome = "aborted"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._door.answering():
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        answering = asyncio.ensure_future(self._serve(send))
        watching = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                watching.result()
        finally:
            # Gone, done or shutting down: in each case nothing of this request may go on.
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
            self._log(began)
        if not answering.cancelled():
            answering.result()

    async def _serve(self, send: Send) -> None:
        try:
            self._answer = answer = await self._exchange.start(self._metrics)
            writer = self._exchange.writer()
            if self._streams:
                await self._send_events(events(answer, writer, metered=self._call.metered), send)
            else:
                await self._send_whole(await whole_body(answer, writer), send)
            self._outcome = "ok"
        except ApiError as fault:
            self._outcome = "failed" if fault.status >= 500 else "refused"
            if not self._started:
                raise
            await self._send_fault(fault, send)
        except Exception:
            self._outcome = "failed"
            log.exception("answer failed", request_id=self._call.request_id)
            unexpected = server_error("The worker failed on this request. Its log has the details.")
            if not self._started:
                raise unexpected from None
            await self._send_fault(unexpected, send)
        finally:
            if self._answer is not None:
                await self._answer.close()

    async def _send_events(self, frames: AsyncIterator[bytes], send: Send) -> None:
        async for frame in frames:
            await self._start_stream(send)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_whole(self, body: bytes, send: Send) -> None:
        await self._start(send, "application/json", [(b"content-length", str(len(body)).encode())])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_fault(self, fault: ApiError, send: Send) -> None:
        """End a stream by an error event; no ``[DONE]`` follows, so nobody takes it for complete."""
        await send({"type": "http.response.body", "body": encode_event(fault.encode()), "more_body": False})

    async def _start_stream(self, send: Send) -> None:
        if not self._started:
            # Proxies must neither keep a stream back nor change it.
            await self._start(send, MEDIA_TYPE, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])

    async def _start(self, send: Send, media_type: str, more: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        head = [(b"content-type", media_type.encode()), (headers.REQUEST_ID.encode(), self._call.request_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head + more})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client is gone; until then keep a silent stream alive."""
        while True:
            try:
                async with asyncio.timeout(self._keepalive_s):
                    message = await receive()
            except TimeoutError:
                if self._streams and self._answer is not None:
                    await self._start_stream(send)
                    await send({"type": "http.response.body", "body": _KEEPALIVE, "more_body": True})
                continue
            if message["type"] == "http.disconnect":
                return

    def _log(self, began: float) -> None:
        answer = self._answer
        prompt_tokens = answer.prompt_tokens if answer else 0
        completion_tokens = answer.completion_tokens if answer else 0
        finish_reason = answer.finish_reason if answer and self._outcome == "ok" else None
        self._metrics.end(self._outcome, finish_reason, prompt_tokens, completion_tokens)
        log.info(
            self._exchange.endpoint,
            request_id=self._call.request_id,
            outcome=self._outcome,
            stream=self._exchange.stream,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            ms=round((time.monotonic() - began) * 1000),
        )
