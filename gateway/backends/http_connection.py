"""One connection to a backend: HTTP/1.1, one request at a time, the answer read as it comes.

httptools parses. A connection does nothing of its own accord, and has neither task nor timer: it writes what it is
given as far as the peer takes it, and keeps what comes until it is read.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import httptools

from gateway.backends.http_answer import Answer, End

READ_AHEAD: Final = 64 * 1024
"""Bytes: an answer of which twice as much waits is not read from its socket, so that the backend must wait."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes that may come without one of a body: an answer's head, what is said before it, and what frames its chunks."""
MOST_HEADERS: Final = 256
WRITTEN_WITH_HEAD: Final = 64 * 1024
"""Bytes of a body: a longer one is written in pieces of this size, each when the peer took most of those before."""
WRITTEN_AT_ONCE: Final = 256 * 1024
"""Bytes, before others have a turn."""
_LISTS: Final = (b"content-encoding", b"transfer-encoding")
"""Headers of which all count that are there; of others the first does."""


class Origin(NamedTuple):
    """Where a connection leads."""

    secure: bool
    host: str
    """A name in ASCII, or an address without brackets."""
    port: int


class _Malformed(Exception):
    """Raised within the parser, which tells it as an error of its own."""


class Connection(asyncio.Protocol):
    """``released``: called when the connection may take another request. ``lost``: when it takes none ever more."""

    __slots__ = (
        "_answer",
        "_before_head",
        "_fruitless",
        "_loop",
        "_lost",
        "_parser",
        "_poll",
        "_reading_paused",
        "_released",
        "_reusable",
        "_transport",
        "_unsent",
        "_until_close",
        "_writing_paused",
        "idle_since",
        "origin",
    )

    def __init__(
        self,
        origin: Origin,
        loop: asyncio.AbstractEventLoop,
        *,
        released: Callable[[Connection], None],
        lost: Callable[[Connection], None],
    ) -> None:
        self.origin = origin
        self.idle_since = 0.0
        """Loop time."""
        self._loop = loop
        self._released = released
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._poll = select.poll()
        self._answer: Answer | None = None
        self._before_head = False
        """Within an informational answer (1xx), which comes before the one that counts."""
        self._until_close = False
        """The answer's body has no other end than the connection's."""
        self._reusable = False
        self._fruitless = 0
        self._unsent: memoryview | None = None
        self._reading_paused = self._writing_paused = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Whether nothing has come that was not read yet, be it the connection's end: asks the kernel, for the event
        loop may not have got round to it."""
        return not self._poll.poll(0)

    def send(self, head: bytes, body: bytes) -> Answer:
        """Only on a fresh connection, and on one that was released."""
        assert self._transport is not None
        answer = self._answer = Answer(self, self._loop)
        self._fruitless = 0
        self._until_close = False
        if len(body) <= WRITTEN_WITH_HEAD:
            self._transport.write(head + body)
        else:
            self._transport.write(head + body[:WRITTEN_WITH_HEAD])
            self._unsent = memoryview(body)[WRITTEN_WITH_HEAD:]
            self._send_on()
        return answer

    def was_read(self) -> None:
        if self._reading_paused and self._answer is not None and len(self._answer.body) < READ_AHEAD:
            self._resume_reading()

    def abort(self) -> None:
        """The peer sees the close at once; whoever waits for an answer, that it was cut."""
        self._end(End.CUT)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, end: End) -> None:
        answer, self._answer = self._answer, None
        self._unsent = None
        if answer is not None:
            if end is End.CUT and not (answer.status or self._fruitless):
                end = End.LOST_EARLY
            answer.conclude(end)

    def _send_on(self) -> None:
        transport = self._transport
        if transport is None:
            return
        left = WRITTEN_AT_ONCE
        while (unsent := self._unsent) is not None and not (self._writing_paused or transport.is_closing()):
            if left <= 0:
                self._loop.call_soon(self._send_on)
                return
            if not (self._reading_paused or self.quiet):
                # It may be an answer before a reset, on which writing would fail: to be read first.
                self._loop.call_soon(self._send_on)
                return
            left -= WRITTEN_WITH_HEAD
            transport.write(unsent[:WRITTEN_WITH_HEAD])
            self._unsent = unsent[WRITTEN_WITH_HEAD:] if len(unsent) > WRITTEN_WITH_HEAD else None

    def _resume_reading(self) -> None:
        self._reading_paused = False
        assert self._transport is not None
        self._transport.resume_reading()

    def _answered(self) -> None:
        """The whole answer came. What still waits to be written would be a request's that was answered unheard."""
        transport = self._transport
        assert transport is not None
        written = self._unsent is None and not self._writing_paused and not transport.get_write_buffer_size()
        if not (self._reusable and written) or transport.is_closing():
            self.abort()
            return
        if self._reading_paused:
            self._resume_reading()
        self._released(self)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._parser = parser = httptools.HttpResponseParser(self)
        # What servers get wrong, and cannot be misread.
        parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked
            self.abort()
            return
        assert self._parser is not None
        self._fruitless += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(End.MALFORMED)  # no matter if the answer has come to its end: what follows it is
            self.abort()
            return
        if self._answer is None:
            self._answered()
        elif self._fruitless > HEAD_LIMIT:
            self._end(End.MALFORMED)
            self.abort()
        elif len(answer.body) > 2 * READ_AHEAD and not self._reading_paused:
            self._reading_paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._end(End.COMPLETE if self._until_close else End.CUT)
        self.abort()

    def connection_lost(self, fault: Exception | None) -> None:
        self.abort()
        self._transport = self._parser = None  # each leads back here
        self._lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._send_on()

    # Called by the parser, within data_received. Without an answer they are about what follows it unasked.

    def on_message_begin(self) -> None:
        if self._answer is None:
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is None or answer.status:  # the latter: a trailer
            return
        name = name.lower()
        headers = answer.headers
        if name not in headers:
            headers[name] = value
        elif name in _LISTS:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        answer, parser = self._answer, self._parser
        if answer is None:
            return
        assert parser is not None
        headers, status = answer.headers, parser.get_status_code()
        if self._fruitless > HEAD_LIMIT and sum(map(len, (*headers, *headers.values()))) > HEAD_LIMIT:
            raise _Malformed
        if len(headers) > MOST_HEADERS or not 100 <= status < 600 or status == 101:
            raise _Malformed
        if status < 200:
            self._before_head = True
            headers.clear()
            return
        coding = headers.get(b"transfer-encoding", b"identity").strip().lower()
        if coding not in (b"chunked", b"identity"):
            raise _Malformed  # it was not asked for, and would have to be undone
        self._until_close = coding != b"chunked" and b"content-length" not in headers
        answer.status = status
        answer.wake()

    def on_body(self, data: bytes) -> None:
        if self._before_head:
            raise _Malformed  # an informational answer has none
        answer = self._answer
        if answer is not None:
            self._fruitless = 0
            answer.body += data
            answer.wake()

    def on_message_complete(self) -> None:
        if self._before_head:
            self._before_head = False
            return
        answer, self._answer = self._answer, None
        if answer is not None:
            assert self._parser is not None
            # There are no chunks before HTTP/1.1: who sends them all the same, or somebody on the way, may not know
            # where they end (RFC 9112, section 6.1).
            self._reusable = self._parser.should_keep_alive() and (
                b"transfer-encoding" not in answer.headers or self._parser.get_http_version() == "1.1"
            )
            answer.conclude(End.COMPLETE)
