"""``POST /v1/chat/completions``: the OpenAI door to the pipeline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.answerable import Answerable
from gateway.ask import Ask, Call
from gateway.http.client import Client, ClientGone
from gateway.http.openai.ask import END_USER_HEADER, TAGS_HEADER, parse_chat
from gateway.http.openai.reference import ChatOperation
from gateway.ids import uuid7
from gateway.pipeline import Pipeline
from worker.protocol.errors import ApiError, server_error
from worker.protocol.sse import DONE, MEDIA_TYPE, encode_comment, encode_event

JSON = "application/json"
SEND_GRACE_S = 5.0
"""How much longer than its route allows an answer may take while its client is slow to read."""
FAREWELL_S = 1.0
"""How long an answer that is broken off by a stop may take to say so."""
_KEEPALIVE = encode_comment(b"keep-alive")
_DONE = encode_event(DONE)
_STREAM_HEADERS = (("content-type", MEDIA_TYPE), ("cache-control", "no-cache"), ("x-accel-buffering", "no"))

_log = structlog.get_logger("gateway.request")


def chat_handler(pipeline: Pipeline, *, max_body_bytes: int, body_timeout_s: float) -> HTTPRouteHandler:
    @post(
        "/v1/chat/completions",
        status_code=200,
        media_type=JSON,
        operation_class=ChatOperation,
        operation_id="createChatCompletion",
        summary="Create a chat completion",
        tags=["Chat"],
    )
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        return ChatCompletion(pipeline, max_body_bytes, body_timeout_s)

    return chat_completions


class ChatCompletion:
    """Answers one request. An ASGI app of its own, for it must see the client's leaving while it works."""

    def __init__(self, pipeline: Pipeline, max_body_bytes: int, body_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._request_id = uuid7()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        try:
            answer = await self._pipeline.serve(
                Call(
                    self._request_id,
                    client.bearer(),
                    client.correlation(),
                    self._reader(client),
                    path=scope["path"],
                    idempotency_key=client.header(b"idempotency-key"),
                )
            )
        except ApiError as error:
            with contextlib.suppress(ClientGone):
                await self._refuse(client, error)
            return
        except ClientGone:
            return
        except Exception:
            with contextlib.suppress(ClientGone):
                await self._fail(client)
            return
        client.on_leaving(answer.left)
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(client.watch(at_most_s=answer.timeout_s + SEND_GRACE_S))
                await self._deliver(client, answer)
                watcher.cancel()
        except* ClientGone:
            pass

    def _reader(self, client: Client) -> Callable[[], Awaitable[Ask]]:
        async def read() -> Ask:
            raw = await client.read_json(self._max_body_bytes, within_s=self._body_timeout_s)
            return parse_chat(raw, end_user=client.text(END_USER_HEADER), tags=client.text(TAGS_HEADER))

        return read

    async def _deliver(self, client: Client, answer: Answerable) -> None:
        try:
            async with answer:
                if answer.streamed:
                    await self._stream(client, answer)
                else:
                    body = await answer.whole()
                    await client.answer(200, body, self._headers(answer), media_type=JSON)
        except ClientGone:
            raise
        except ApiError as error:
            await self._refuse(client, error, answer)
        except asyncio.CancelledError:
            if answer.client_left:
                raise
            # The server stops and wants this task to end, which it does; a client that does not read cannot delay it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._refuse(client, _stopping(), answer)
        except Exception:
            await self._fail(client, answer)

    async def _stream(self, client: Client, answer: Answerable) -> None:
        events = await answer.events()
        await client.start(200, [*_STREAM_HEADERS, *self._headers(answer)])
        while not answer.complete:
            await client.write(b"".join([encode_event(data) for data in events]) or _KEEPALIVE)
            events = await answer.events()
        await client.end(b"".join([encode_event(data) for data in events]) + _DONE)

    def _headers(self, answer: Answerable | None) -> list[tuple[str, str]]:
        headers = [("x-request-id", str(self._request_id))]
        if answer is not None:
            headers += answer.headers()
        return headers

    async def _refuse(self, client: Client, error: ApiError, answer: Answerable | None = None) -> None:
        """Tell the error by the answer's status or, once that has left, by an event that no [DONE] follows."""
        if client.started:
            await client.end(encode_event(error.encode()))
        else:
            headers = self._headers(answer)
            names = {name for name, _ in headers}
            headers += [(name, value) for name, value in error.headers.items() if name not in names]
            await client.answer(error.status, error.encode(), headers, media_type=JSON)

    async def _fail(self, client: Client, answer: Answerable | None = None) -> None:
        """A fault of our own: logged whole, told without detail. To be called while it is being handled."""
        _log.exception("request_crashed", request_id=str(self._request_id))
        error = server_error(f"The gateway failed. The operator finds the cause under request id {self._request_id}.")
        await self._refuse(client, error, answer)


def _stopping() -> ApiError:
    return ApiError(
        503,
        "The gateway is stopping and broke this answer off. Send the request again.",
        type="server_error",
        code="gateway_stopping",
        headers={"retry-after": "1"},
    )
