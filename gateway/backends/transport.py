"""HTTP to backends: a client of our own, for what is sent and read here is little and its cost is in every request.

No limit on connections, so that a dead backend hangs nobody else; no cookies, no redirects, no proxies from the
environment. What a backend compressed is undone here, piece by piece. Every failure comes out as a BackendFault.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Final, NamedTuple

from yarl import URL

from gateway.backends import faults
from gateway.backends.decompression import BadCoding, decompressor
from gateway.backends.faults import BackendFault
from gateway.backends.http_answer import Answer
from gateway.backends.http_connection import Origin
from gateway.backends.http_pool import Pool

_MOST_TARGETS: Final = 1000
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_PORTS: Final = {"http": 80, "https": 443}


class Reply:
    """A backend's answer, its body still to be read."""

    __slots__ = ("_answer", "_decompressor", "media_type", "status")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.status = answer.status
        headers = answer.headers
        self.media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        codings = headers.get(b"content-encoding")
        self._decompressor = None if codings is None else decompressor([codings.decode("latin-1")])

    def header(self, name: str) -> str | None:
        value = self._answer.headers.get(name.lower().encode())
        return None if value is None else value.strip().decode("latin-1")

    @property
    def came(self) -> bool:
        """Whether there is something to be read now, so that ``read_some`` need not wait."""
        answer = self._answer
        return self._decompressor is None and (bool(answer.body) or answer.end is not None)

    async def read_some(self) -> bytes:
        """The next bytes of the body as they come, some ``PIECE`` at most; empty at its end. Cancelling it loses none.

        Raises BackendFault when the body was cut, or is not what its content coding says; what came before a cut comes
        first, as the error by which a backend explains it.
        """
        unpacking = self._decompressor
        if unpacking is None:
            return await self._answer.read()
        try:
            while not (piece := unpacking.take()):
                packed = await self._answer.read()
                if not packed:
                    unpacking.end()
                    return b""
                unpacking.feed(packed)
            return piece
        except BadCoding as fault:
            raise faults.malformed(str(fault)) from fault

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
        if self._answer.end is not None:
            return
        try:
            async with asyncio.timeout(within_s):
                while await self._answer.read():
                    pass
        except (TimeoutError, BackendFault):
            self.close()

    def close(self) -> None:
        """Drop the connection unless the whole body came: the backend sees the close at once."""
        self._answer.close()


class _Target(NamedTuple):
    origin: Origin
    line: str
    """What follows the method: path, version and the host's header."""


class Transport:
    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._targets: dict[str, _Target] = {}

    async def __aenter__(self) -> Transport:
        self._pool = Pool(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            await asyncio.sleep(0)  # in which the event loop closes their sockets

    async def post(self, url: str, *, headers: Mapping[str, str], body: bytes, connect_s: float) -> Reply:
        """Send ``body``; return when the head of the answer is here. Raises BackendFault.

        ``connect_s`` is the limit for a connection: look-up of the name, TCP and TLS. ``headers`` are sent as they are,
        beside host and length.
        """
        return await self._request("POST", url, headers, body, connect_s)

    async def get(self, url: str, *, headers: Mapping[str, str], connect_s: float) -> Reply:
        """Return when the head of the answer is here. Raises BackendFault."""
        return await self._request("GET", url, headers, None, connect_s)

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, connect_s: float
    ) -> Reply:
        pool = self._pool
        if pool is None:
            raise RuntimeError("the transport is not open")
        try:
            target = self._targets.get(url) or self._target(url)
            head = _head(method, target, headers, body)
        except ValueError as fault:
            raise faults.unreachable() from fault
        connection = pool.take(target.origin)
        while True:
            # A connection that idled may have been closed by the peer just as it is used. What may be asked twice is;
            # of the rest the relay decides.
            again = connection is not None and body is None
            if connection is None:
                try:
                    connection = await pool.connect(target.origin, connect_s)
                except (OSError, ValueError) as fault:
                    raise faults.unreachable() from fault
            answer = connection.send(head, body or b"")
            try:
                await answer.head()
            except BackendFault as fault:
                if not (again and fault.lost_early):
                    raise
                connection = None
            except BaseException:
                connection.abort()
                raise
            else:
                return Reply(answer)

    def _target(self, text: str) -> _Target:
        """Raises ValueError."""
        url = URL(text)
        host, port = url.raw_host, url.port
        if (
            url.scheme not in _PORTS
            or not host
            or port is None
            or url.raw_user is not None
            or url.raw_password is not None
        ):
            raise ValueError("no URL of a backend")
        line = f" {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
        if not line.isascii() or line.count(" ") != 3 or _CONTROL.search(line.replace("\r\n", "", 2)):
            raise ValueError("no URL of a backend")
        if len(self._targets) >= _MOST_TARGETS:
            self._targets.clear()
        target = self._targets[text] = _Target(Origin(url.scheme == "https", host, port), line)
        return target


def _head(method: str, target: _Target, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Raises ValueError for what would not be a header, or more than one."""
    # The quick look finds more than is forbidden.
    if not "".join((*headers, *headers.values())).isprintable() and any(
        _CONTROL.search(text) for header in headers.items() for text in header
    ):
        raise ValueError("a control character in a header")
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    return f"{method}{target.line}{lines}{length}\r\n".encode()
