"""The other end of an HTTP connection, as one request of it is answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_STATUS_LINE: Final = b"HTTP/1.1 "
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ONE_PIECE: Final = 64 * 1024
"""Bytes of a body up to which it is copied behind its head."""
PEER: Final = "penstock.peer"
"""Extension of the scope: its ``Peer``."""


class Outlet:
    """As much as a request's cycle needs of its connection. The head of an answer leaves together with what follows it
    in the same turn of the event loop: writing is what costs a server most."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._close = close
        self._head = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_STATUS_LINE):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def write_whole(self, head: bytes, body: bytes) -> None:
        if self._head:  # of an informational answer
            head, self._head = self._head + head, b""
        if len(body) <= _ONE_PIECE:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._close()


class Peer:
    """The other end of one request's connection, for an application that wants to do without ASGI's messages where it
    can: they take a good part of a short answer's time."""

    __slots__ = ("_callback", "_cycle", "_outlet", "left")

    def __init__(self, cycle: RequestResponseCycle, outlet: Outlet) -> None:
        self.left = False
        """It hung up before its answer was sent whole."""
        self._callback: Callable[[], None] | None = None
        self._cycle = cycle
        self._outlet = outlet

    def on_leaving(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback``, in place of an earlier one, when it hangs up; None: nobody wants to know any more."""
        self._callback = callback

    def leave(self) -> None:
        self.left = True
        if self._callback is not None:
            self._callback()

    def hears(self, send: object) -> bool:
        """Whether ``send`` is its own: with another around it, which may have something to add, all has to go by
        that."""
        return send == self._cycle.send

    def body(self) -> bytes | None:
        """The body, or what ``receive`` did not give of it yet. None: it has not come whole, and ``receive`` waits."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.response_complete:
            return None
        cycle.waiting_for_100_continue = False  # the client did not wait
        cycle.flow.resume_reading()
        cycle.message_event.clear()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def answer(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> bool:
        """Send a whole answer; ``content-length`` is not among ``headers``, which have lower-case names. False: it has
        to be sent by ASGI. Raises ValueError for a header that cannot be sent, and as the transport's ``write``."""
        cycle = self._cycle
        if cycle.response_started or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
            return False
        lines = [f"content-length: {len(body)}"]
        for name, value in headers:
            if name == "connection":
                return False
            lines.append(f"{name}: {value}")
        if not cycle.keep_alive:
            lines.append("connection: close")
        told = "\r\n".join(lines).encode("latin-1")
        if _CONTROL.search(told) or not told.count(b"\n") == told.count(b"\r") == len(lines) - 1:
            raise ValueError("a header's value has a control character in it")
        if not cycle.disconnected:
            common = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
            self._outlet.write_whole(b"%b%b%b\r\n\r\n" % (STATUS_LINE[status], common, told), body)
            cycle.response_started = cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
        return True
