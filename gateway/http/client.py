"""The caller of one request at the ASGI seam: its headers, its body within limits, its leaving, and what it is sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import cast

import structlog
from litestar.types import HTTPSendMessage, Receive, Scope, Send

from worker.protocol.errors import ApiError
from worker.protocol.http_peer import PEER, Peer

_CORRELATION = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("gateway.request")

Headers = Iterable[tuple[str, str]]


def bearer(authorization: str | None) -> str | None:
    """The token in an ``authorization`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def api_key(authorization: str | None, x_api_key: str | None) -> str | None:
    """The caller's key, by the header that OpenAI's clients send, or by Anthropic's."""
    return bearer(authorization) or x_api_key


class ClientGone(Exception):
    """The caller hung up."""


class Client:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers = {name.lower(): value for name, value in scope["headers"]}
        self.peer = cast("Peer | None", (scope.get("extensions") or {}).get(PEER))
        """None: the server does not tell of hang-ups, and has ASGI's messages alone."""
        self.left: Callable[[], None] | None = None
        """Called before a ClientGone."""
        self.finished = False
        """Whether the whole answer left."""
        self.started = False
        """Whether the head of the answer left."""

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def text(self, name: str) -> str | None:
        """A header's text: UTF-8 if it is that, else Latin-1."""
        value = self._headers.get(name.encode())
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.decode("latin-1")

    def bearer(self) -> str | None:
        """The token of the ``authorization`` header."""
        return bearer(self.header(b"authorization"))

    def key(self) -> str | None:
        return api_key(self.header(b"authorization"), self.header(b"x-api-key"))

    def correlation(self) -> str | None:
        """The caller's own ``x-request-id``, if it is short and printable."""
        given = self.header(b"x-request-id")
        return given if given is not None and _CORRELATION.fullmatch(given) else None

    async def read_json(self, limit: int, *, within_s: float) -> bytes:
        """The whole body. Raises ApiError (408, 413, 415) as soon as it can be told, ClientGone."""
        media_type = (self.header(b"content-type") or "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise ApiError(415, "Send the body as JSON, with 'content-type: application/json'.")
        if (self.header(b"content-encoding") or "identity").lower() != "identity":
            raise ApiError(415, "Send the body without 'content-encoding'.")
        length = self.header(b"content-length")
        if length is not None and length.isdecimal() and int(length) > limit:
            raise self._too_large(limit)
        came = None if self.peer is None else self.peer.body()
        if came is not None:
            if len(came) > limit:
                raise self._too_large(limit)
            return came
        try:
            async with asyncio.timeout(within_s):
                return await self._read(limit)
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {within_s:g} s. Send the request again.",
                code="request_body_timeout",
                headers={"connection": "close"},
            ) from None

    async def _read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            parts.append(message["body"])
            size += len(message["body"])
            if size > limit:
                raise self._too_large(limit)
            more = message["more_body"]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @staticmethod
    def _too_large(limit: int) -> ApiError:
        return ApiError(
            413,
            f"The body is over {limit} bytes, the most that is taken here.",
            code="request_too_large",
            # The rest of the body is not read, so the connection cannot serve another request.
            headers={"connection": "close"},
        )

    def watched(self, left: Callable[[], None], *, at_most_s: float) -> Watched:
        """A context manager that ends its block by ClientGone when the caller hangs up, or has taken over
        ``at_most_s``. ``left`` is called before, as before any ClientGone that what sends in the block raises.
        """
        return Watched(self, left, at_most_s)

    def _gone(self) -> ClientGone:
        if self.left is not None:
            self.left()
        return ClientGone()

    def _unreachable(self, fault: Exception) -> ClientGone:
        # Which of them a closed connection raises is the event loop's affair.
        _log.info("client_unreachable", error=str(fault))
        return self._gone()

    async def _transmit(self, message: HTTPSendMessage) -> None:
        """Raises ClientGone."""
        try:
            await self._send(message)
        except (OSError, RuntimeError) as fault:
            raise self._unreachable(fault) from fault

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head. Like all that sends, raises ClientGone."""
        self.started = True
        await self._transmit(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            }
        )

    async def write(self, data: bytes) -> None:
        await self._transmit({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.finished = True
        await self._transmit({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Headers = (), *, media_type: str) -> None:
        """A whole answer."""
        peer = self.peer
        if peer is not None and not self.started and peer.hears(self._send):
            try:
                if peer.answer(status, [("content-type", media_type), *headers], body):
                    self.started = self.finished = True
                    return
            except (OSError, RuntimeError) as fault:
                raise self._unreachable(fault) from fault
        await self.start(status, [("content-type", media_type), ("content-length", str(len(body))), *headers])
        await self.end(body)


class Watched:
    """See ``Client.watched``. It works as ``asyncio.timeout`` does: by cancelling the task whose block it is."""

    def __init__(self, client: Client, left: Callable[[], None], at_most_s: float) -> None:
        self._client = client
        self._left = left
        self._at_most_s = at_most_s
        self._ended = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._client.left = self._left
        self._timer = asyncio.get_running_loop().call_later(self._at_most_s, self._end)
        peer = self._client.peer
        if peer is not None:
            peer.on_leaving(self._end)
            if peer.left:
                self._end()

    def _end(self) -> None:
        if not (self._ended or self._client.finished):
            self._ended = True
            self._left()
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._client.left = None
        if self._client.peer is not None:
            self._client.peer.on_leaving(None)
        if self._ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from fault
