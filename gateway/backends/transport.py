"""HTTP to backends: the one place that knows which client library is used.

No limit on connections, so that a dead backend hangs nobody else; no cookies, no redirects, no proxies from the
environment. What a backend compressed is undone here, piece by piece. Every failure comes out as a BackendFault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from gateway.backends import faults
from gateway.backends.decompression import PIECE, BadCoding, decompressor

READ_AHEAD = 64 * 1024
"""Bytes: a reply of which twice as much waits to be read is not read from its socket, so that the backend must wait."""
IDLE_CONNECTION_S = 3.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that we seldom write into a closing one."""


class Reply:
    """A backend's answer, its body still to be read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self._decompressor = decompressor(response.headers.getall("content-encoding", []))

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    @property
    def came(self) -> bool:
        """Whether there is something to be read now, so that ``read_some`` need not wait."""
        content = self._response.content
        return self._decompressor is None and (content.is_eof() or bool(content._buffer))

    async def read_some(self) -> bytes:
        """The next bytes of the body as they come, some ``PIECE`` at most; empty at its end. Cancelling it loses none.

        Raises BackendFault when the body was cut, or is not what its content coding says.
        """
        unpacking = self._decompressor
        try:
            if unpacking is None:
                return await self._read()
            while not (piece := unpacking.take()):
                packed = await self._read()
                if not packed:
                    unpacking.end()
                    return b""
                unpacking.feed(packed)
            return piece
        except BadCoding as fault:
            raise faults.malformed(str(fault)) from fault

    async def _read(self) -> bytes:
        content = self._response.content
        try:
            return await content.read(PIECE)
        except (aiohttp.ClientError, OSError) as fault:
            # What came before a cut counts, as the error by which a backend explains it. aiohttp would drop it.
            if came := content._read_nowait(PIECE):
                return came
            raise faults.disconnected() from fault

    async def read_limited(self, limit: int) -> bytes | None:
        """The whole body; None when it is longer than ``limit`` bytes. Raises BackendFault when it was cut."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.read_some():
            size += len(chunk)
            if size > limit:
                return None
            parts.append(chunk)
        return b"".join(parts)

    async def finish(self, within_s: float = 0.25) -> None:
        """Wait shortly for the end of a body whose last event came, so that the connection can be used again."""
        if self._response.content.at_eof():
            return
        try:
            async with asyncio.timeout(within_s):
                while await self.read_some():
                    pass
        except (TimeoutError, faults.BackendFault):
            self.close()

    def close(self) -> None:
        """Drop the connection unless the whole body was read: the backend sees the close at once."""
        self._response.close()


class _Protocol(ResponseHandler):
    """Reading that was not paused needs no resuming: aiohttp does so, parser and socket, with each chunk of a body."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:
            super().resume_reading(resume_parser)


class _Connector(aiohttp.TCPConnector):
    """Uses no idle connection again on which something came: aiohttp would take it for the next request's answer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = partial(_Protocol, loop=self._loop)  # type: ignore[assignment]

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        while (found := await super()._get(key, traces)) is not None:
            if found.protocol is not None and not found.protocol.should_close:
                return found
            found.close()
        return None


class Transport:
    def __init__(self) -> None:
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    async def __aenter__(self) -> Transport:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, enable_cleanup_closed=False),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            trust_env=False,
            read_bufsize=READ_AHEAD,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, url: str, *, headers: Mapping[str, str], body: bytes, connect_s: float) -> Reply:
        """Send ``body``; return when the head of the answer is here. Raises BackendFault.

        ``connect_s`` is the limit for a connection: look-up of the name, TCP and TLS.
        """
        return await self._request("POST", url, headers, body, connect_s)

    async def get(self, url: str, *, headers: Mapping[str, str], connect_s: float) -> Reply:
        """Return when the head of the answer is here. Raises BackendFault."""
        return await self._request("GET", url, headers, None, connect_s)

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, connect_s: float
    ) -> Reply:
        if self._session is None:
            raise RuntimeError("the transport is not open")
        try:
            return Reply(
                await self._session.request(
                    method,
                    self._url(url),
                    headers=headers,
                    data=None if body is None else aiohttp.BytesPayload(body),
                    allow_redirects=False,
                    timeout=self._timeout(connect_s),
                )
            )
        # ValueError: a URL that cannot be one.
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError) as fault:
            raise faults.unreachable() from fault
        except (aiohttp.ServerConnectionError, aiohttp.ClientOSError, OSError) as fault:
            raise faults.disconnected(early=True) from fault
        except aiohttp.ClientError as fault:
            raise faults.malformed("sent an answer that is not HTTP") from fault

    def _timeout(self, connect_s: float) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(connect_s)
        if timeout is None:
            timeout = self._timeouts[connect_s] = aiohttp.ClientTimeout(total=None, connect=connect_s)
        return timeout

    def _url(self, text: str) -> URL:
        url = self._urls.get(text)
        if url is None:
            if len(self._urls) > 1000:
                self._urls.clear()
            url = self._urls[text] = URL(text)
        return url
