"""One backend's answer as it comes over a connection: filled there, read by who asked."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Protocol

from gateway.backends import faults
from gateway.backends.decompression import PIECE
from gateway.backends.faults import BackendFault


class End(Enum):
    COMPLETE = "complete"
    LOST_EARLY = "lost before any byte of it came"
    CUT = "cut"
    MALFORMED = "malformed"


class Carrier(Protocol):
    """The connection that an answer comes over."""

    def was_read(self) -> None:
        """Some of the body was taken, so that more may come."""
        ...

    def abort(self) -> None: ...


class Answer:
    """What comes for one request: its head, then its body, then its end. One reader at a time."""

    __slots__ = ("_connection", "_loop", "_waiter", "body", "end", "headers", "status")

    def __init__(self, connection: Carrier, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        """Zero until the head is here."""
        self.headers: dict[bytes, bytes] = {}
        """By names in lower case."""
        self.body = bytearray()
        """What came of it and was not read."""
        self.end: End | None = None
        self._loop = loop
        self._connection: Carrier | None = connection
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for ``status`` and ``headers``. Raises BackendFault."""
        if not self.status:
            if self.end is None:
                await self._wait()
            if not self.status:
                raise self._fault()

    async def read(self) -> bytes:
        """The next bytes of the body, ``PIECE`` at most; empty at its end. Cancelling it loses none.

        Raises BackendFault, after all that came before, when the body was cut or is malformed.
        """
        body = self.body
        while not body:
            if self.end is not None:
                if self.end is End.COMPLETE:
                    return b""
                raise self._fault()
            await self._wait()
        if len(body) <= PIECE:
            piece = bytes(body)
            body.clear()
        else:
            piece = bytes(memoryview(body)[:PIECE])
            del body[:PIECE]
        if self._connection is not None:
            self._connection.was_read()
        return piece

    def close(self) -> None:
        """Drop the connection, unless the answer has come to its end."""
        if self._connection is not None:
            self._connection.abort()

    def conclude(self, end: End) -> None:
        self.end, self._connection = end, None
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fault(self) -> BackendFault:
        if self.end is End.MALFORMED:
            return faults.malformed("sent an answer that is not HTTP")
        return faults.disconnected(early=self.end is End.LOST_EARLY)
