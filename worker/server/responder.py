"""Sends one chat answer over ASGI, and stops the engine as soon as the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

import structlog
from litestar.types import Receive, Scope, Send

from worker.protocol import headers
from worker.protocol.errors import ApiError, server_error
from worker.protocol.sse import MEDIA_TYPE, encode_comment, encode_event
from worker.server.answer import AnswerHead, metered_whole, streamed, whole_body
from worker.server.completion import Call, ChatService, Completion
from worker.server.door import Door
from worker.server.parameters import ChatParameters

KEEPALIVE_S: Final = 10.0
_KEEPALIVE: Final = encode_comment(b"keep-alive")

log = structlog.get_logger("penstock.worker")


class ChatResponder:
    """An ASGI application that answers one request.

    An event stream's headers leave with its first token, so that whatever fails before it has a status of its own; a
    metered one's with the first chunk of the prompt, for the meter runs from there. A wait longer than ``keepalive_s``
    seconds is filled with comments. Raises ApiError if nothing was sent yet.
    """

    def __init__(
        self,
        service: ChatService,
        parameters: ChatParameters,
        call: Call,
        door: Door,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._service = service
        self._parameters = parameters
        self._call = call
        self._door = door
        self._keepalive_s = keepalive_s
        self._streams = parameters.stream or call.metered
        self._head = AnswerHead(f"chatcmpl-{call.request_id.replace('-', '')}", int(time.time()), parameters.model)
        self._completion: Completion | None = None
        self._started = False
        self._outcome = "aborted"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._door.answering():
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        answering = asyncio.ensure_future(self._answer(send))
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

    async def _answer(self, send: Send) -> None:
        try:
            self._completion = await self._service.start(self._parameters, self._call)
            if self._streams:
                await self._send_events(self._events(self._completion), send)
            else:
                await self._send_whole(await whole_body(self._head, self._completion), send)
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
            if self._completion is not None:
                await self._completion.close()

    def _events(self, completion: Completion) -> AsyncIterator[bytes]:
        if not self._parameters.stream:
            return metered_whole(self._head, completion)
        return streamed(
            self._head, completion, include_usage=self._parameters.include_usage, metered=self._call.metered
        )

    async def _send_events(self, events: AsyncIterator[bytes], send: Send) -> None:
        async for frame in events:
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
                if self._streams and self._completion is not None:
                    await self._start_stream(send)
                    await send({"type": "http.response.body", "body": _KEEPALIVE, "more_body": True})
                continue
            if message["type"] == "http.disconnect":
                return

    def _log(self, began: float) -> None:
        completion = self._completion
        log.info(
            "chat",
            request_id=self._call.request_id,
            outcome=self._outcome,
            stream=self._parameters.stream,
            prompt_tokens=completion.prompt_tokens if completion else 0,
            completion_tokens=completion.completion_tokens if completion else 0,
            ms=round((time.monotonic() - began) * 1000),
        )
