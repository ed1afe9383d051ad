"""The way of one request for inference through a door, whichever API the door speaks: read, serve, deliver, refuse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import structlog
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Operation
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.answerable import Answerable
from gateway.ask import Ask, Call
from gateway.http.client import Client, ClientGone
from gateway.ids import uuid7
from gateway.pipeline import Pipeline
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError, server_error
from worker.protocol.sse import MEDIA_TYPE, encode_comment

JSON = "application/json"
SEND_GRACE_S = 5.0
"""How much longer than its route allows an answer may take while its client is slow to read."""
FAREWELL_S = 1.0
"""How long an answer that is broken off by a stop may take to say so."""
_STREAM_HEADERS = (("content-type", MEDIA_TYPE), ("cache-control", "no-cache"), ("x-accel-buffering", "no"))

_log = structlog.get_logger("gateway.request")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    bytes: int
    within_s: float
    """For a body to arrive whole."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an API stands, and what the API reference says of it."""

    path: str
    operation: type[Operation]
    operation_id: str
    summary: str
    tag: str


class Door(Protocol):
    """How one API reads requests and words answers. One for each request."""

    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        """What ``raw`` asks for. Raises ApiError."""
        ...

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What the API has in the head of every answer."""
        ...

    def event(self, data: bytes) -> bytes:
        """One event of a stream, on the wire."""
        ...

    @property
    def last(self) -> bytes:
        """What ends a good stream."""
        ...

    @property
    def sign_of_life(self) -> bytes:
        """What keeps a silent stream open."""
        ...

    def status(self, error: ApiError) -> int:
        """Of an error answer."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error answer."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """An error in a stream, on the wire; nothing follows it."""
        ...

    def deliver(self, answer: Answerable) -> Answerable:
        """``answer``, or what sees to it on its way to the client."""
        ...


KEEP_ALIVE = encode_comment(b"keep-alive")


def inference_handler(reference: Reference, make: Callable[[], Inference]) -> HTTPRouteHandler:
    """``make``: what answers one request."""

    @post(
        reference.path,
        status_code=200,
        media_type=JSON,
        operation_class=reference.operation,
        operation_id=reference.operation_id,
        summary=reference.summary,
        tags=[reference.tag],
    )
    async def infer() -> ASGIApp:
        return make()

    return infer


class Inference:
    """Answers one request. An ASGI app of its own, for it must see the client's leaving while it works."""

    def __init__(self, door: Callable[[UUID, Client], Door], pipeline: Pipeline, limits: BodyLimits) -> None:
        self._make_door = door
        self._pipeline = pipeline
        self._limits = limits
        self._request_id = uuid7()
        self._id = str(self._request_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        self._door = door = self._make_door(self._request_id, client)
        try:
            answer = door.deliver(
                await self._pipeline.serve(
                    Call(
                        self._request_id,
                        client.key(),
                        client.correlation(),
                        self._reader(client, door),
                        path=scope["path"],
                        idempotency_key=client.header(b"idempotency-key"),
                        traceparent=client.header(b"traceparent"),
                        cache=client.header(b"x-penstock-cache"),
                        cache_ttl=client.header(b"x-penstock-cache-ttl"),
                        log=client.header(b"x-penstock-log"),
                    )
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
        try:
            with client.watched(answer.left, at_most_s=answer.timeout_s + SEND_GRACE_S):
                await self._deliver(client, answer)
        except ClientGone:
            return

    def _reader(self, client: Client, door: Door) -> Callable[[Principal], Awaitable[Ask]]:
        async def read(principal: Principal) -> Ask:
            raw = await client.read_json(self._limits.bytes, within_s=self._limits.within_s)
            return await door.ask(raw, principal)

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
                    await self._refuse(client, stopping(), answer)
        except Exception:
            await self._fail(client, answer)

    async def _stream(self, client: Client, answer: Answerable) -> None:
        door = self._door
        events = await answer.events()
        await client.start(200, [*_STREAM_HEADERS, *self._headers(answer)])
        while not answer.complete:
            await client.write(b"".join([door.event(data) for data in events]) or door.sign_of_life)
            events = await answer.events()
        await client.end(b"".join([door.event(data) for data in events]) + door.last)

    def _headers(self, answer: Answerable | None) -> list[tuple[str, str]]:
        headers = [("x-request-id", self._id), *self._door.headers]
        if answer is not None:
            headers += answer.headers()
        return headers

    async def _refuse(self, client: Client, error: ApiError, answer: Answerable | None = None) -> None:
        """Tell the error by the answer's status or, once that has left, by an event that nothing follows."""
        if client.started:
            await client.end(self._door.error_event(error))
        else:
            headers = self._headers(answer)
            names = {name for name, _ in headers}
            headers += [(name, value) for name, value in error.headers.items() if name not in names]
            await client.answer(self._door.status(error), self._door.error(error), headers, media_type=JSON)

    async def _fail(self, client: Client, answer: Answerable | None = None) -> None:
        """A fault of our own: logged whole, told without detail. To be called while it is being handled."""
        _log.exception("request_crashed", request_id=self._id)
        error = server_error(f"The gateway failed. The operator finds the cause under request id {self._id}.")
        await self._refuse(client, error, answer)


def stopping() -> ApiError:
    return ApiError(
        503,
        "The gateway is stopping and broke this answer off. Send the request again.",
        type="server_error",
        code="gateway_stopping",
        headers={"retry-after": "1"},
    )
