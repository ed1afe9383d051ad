"""The caller of one request at the ASGI seam: its headers, its body within limits, its leaving, and what it is sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable

import structlog
from litestar.types import HTTPSendMessage, Receive, Scope, Send

from worker.protocol.errors import ApiError

_CORRELATION = re.compile(r"[\x21-\x7e]{1,128}")
_log = structlog.get_logger("gateway.request")

Headers = Iterable[tuple[str, str]]


def bearer(authorization: str | None) -> str | None:
    """The token in an ``authorization`` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class ClientGone(Exception):
    """The caller hung up."""


class Client:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers = {name.lower(): value for name, value in scope["headers"]}
        self._finished = False
        self._left: Callable[[], None] | None = None
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
        """The caller's API key, as OpenAI's clients send it, or as Anthropic's do."""
        return self.bearer() or self.header(b"x-api-key")

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

    def on_leaving(self, left: Callable[[], None]) -> None:
        """``left`` is called before a ClientGone that ``watch`` or what sends raises."""
        self._left = left

    async def watch(self, *, at_most_s: float) -> None:
        """Wait until the caller hangs up, or has taken over ``at_most_s``; raise ClientGone.

        Returns only when the answer was sent whole. Run it beside the work, in a task group, after the body was read.
        """
        try:
            async with asyncio.timeout(at_most_s):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
        if not self._finished:
            raise self._gone()

    def _gone(self) -> ClientGone:
        if self._left is not None:
            self._left()
        return ClientGone()

    async def _transmit(self, message: HTTPSendMessage) -> None:
        """Raises ClientGone."""
        try:
            await self._send(message)
        except (OSError, RuntimeError) as fault:
            # Which of them a closed connection raises is the event loop's affair.
            _log.info("client_unreachable", error=str(fault))
            raise self._gone() from fault

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
        self._finished = True
        await self._transmit({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Headers = (), *, media_type: str) -> None:
        """A whole answer."""
        await self.start(status, [("content-type", media_type), ("content-length", str(len(body))), *headers])
        await self.end(body)
