"""HTTP/1 as both programs serve it: uvicorn's protocol, mended where it loses a body, misses a hang-up, or waits and
grows for a client without end."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sized
from typing import Any, Final, cast

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from worker.protocol.http_peer import PEER, Outlet, Peer

_HANGUP_CHECK_S: Final = 0.25
"""How often a connection with requests waiting is looked at: reading may be paused there, so no end would be seen."""
MOST_WAITING: Final = 1024
"""Requests that came before those ahead of them were answered: more than one read brings, unless they are tiny."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes of a request's head, or of what stands behind a chunked body; what came with one read may be more."""
HEAD_WITHIN_S: Final = 60.0
"""For a connection's first request, or one of which a part came, to have a whole head."""
FLUSH_CHECK_S: Final = 30.0
"""How often an answer is looked at that its client does not read: one that took none of it meanwhile is left."""
LINGER_S: Final = 30.0
"""How long a client may go on sending a body that was refused. A connection that is closed with something unread is
reset, and the answer may be lost with it (RFC 9112, section 9.6)."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. For ``uvicorn.Config(http=HttpProtocol, ws="none")``.

    - An offer to upgrade the connection is ignored (RFC 9110, section 7.8) and the request served as HTTP/1.1 with its
      whole body, unless ``accepts_upgrade`` takes it.
    - A hang-up reaches the request that runs though others wait behind it, within ``_HANGUP_CHECK_S``, unless more was
      sent ahead than the kernel holds: the client's end then comes behind what nobody reads yet.
    - The request that runs finds in its scope's extensions, as ``PEER``, what tells of a hang-up by a callback, and a
      shorter way for bodies and whole answers.
    - An answer of unknown length to an HTTP/1.0 client, which knows no chunks, ends with the connection.
    - Nothing is read while requests wait, and only so many of what one read brought may. A client that has sent on gets
      the answer all the same that closes the connection.
    - A head that does not end is refused (431, 408). A client that reads nothing of what is left for it is cut off once
      its request is over.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._running: RequestResponseCycle | None = None
        self._peer: Peer | None = None
        self._hangup_check: asyncio.TimerHandle | None = None
        self._upgrading = False
        self._idle_since: float | None = None
        """Since when the connection waits for another request."""
        self._fruitless = 0
        """Bytes since the parser came to the end of a head or of a request, or to a piece of a body."""
        self._head_limit: asyncio.TimerHandle | None = None
        self._flush_check: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self.parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn sets it: what follows a request that closes the connection is no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def accepts_upgrade(self) -> bool:
        """Whether the request whose head has been read, a GET without a body, may make the connection a WebSocket."""
        return False

    def _should_upgrade(self) -> bool:
        return (
            super()._should_upgrade()
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
            and not self.pipeline
            and (self.cycle is None or self.cycle.response_complete)
            and self.accepts_upgrade()
        )

    # Heads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._outlet = Outlet(transport, self.loop, self._close)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        self._unset_keepalive_if_required()
        self._fruitless += len(data)
        self._feed(data)
        if self._fruitless > HEAD_LIMIT:
            self._refuse(431, f"The request's head is over {HEAD_LIMIT} bytes.")
        elif not (self._busy or self._upgrading):
            self._expect_head()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_limit is None:
            self._head_limit = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self._fruitless:
            self._refuse(408, "The request's head did not arrive in time.")
        else:
            self.transport.close()

    def _head_came(self) -> None:
        self._fruitless = 0
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be read, and close. Not into the answer to a request that still runs, unless it is that
        one's body which cannot be read, and its answer has not begun."""
        self._fruitless = 0
        running = self._running
        if self._busy and running is self.cycle and running.more_body and not running.response_started:
            self._disconnect()
            running.response_complete = True
        if not (self._busy or self.transport.is_closing()):
            self.transport.write(
                b"%scontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (STATUS_LINE[status], len(message), message.encode())
            )
        self.transport.close()

    # Upgrade offers. The parser takes what follows such a head for another protocol and gives up there; it cannot be
    # told otherwise. So it is given the head again, as it understood it, without the offer.

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    data = data[offer.args[0] :]
                    if self._upgrading:
                        if data:
                            # Only who mistakes the connection for another sends on before it is a WebSocket.
                            self.send_400_response("Nothing may follow a WebSocket's handshake before its answer.")
                        else:
                            self.handle_websocket_upgrade()
                        return
                    if self.parser.get_method() == b"CONNECT":
                        self.send_400_response("This is no proxy: CONNECT is not served.")
                        return
                    self._parse_without_offer()
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _parse_without_offer(self) -> None:
        """Raises HttpParserError."""
        head = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head.append(b"\r\n")
        # A fresh one: the old one remembers that this request had no body.
        self.parser = self._new_parser()
        self.parser.feed_data(b"".join(head))

    def on_headers_complete(self) -> None:
        self._head_came()
        if self.parser.should_upgrade():
            self._upgrading = self._should_upgrade()
            if self._upgrading:
                super().on_headers_complete()
            return
        if self.expect_100_continue and self.parser.get_http_version() != "1.1":
            self.expect_100_continue = False  # such a client takes the invitation for the answer (RFC 9110, 10.1.1)
        if len(self.pipeline) >= MOST_WAITING:
            raise _TooMany  # which the parser tells as an error of its own
        super().on_headers_complete()
        self.cycle.transport = self._outlet  # type: ignore[assignment]
        if self.pipeline and self._hangup_check is None:
            self._hangup_check = self.loop.call_later(_HANGUP_CHECK_S, self._check_hangup)

    def on_message_complete(self) -> None:
        self._fruitless = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # Hang-ups

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        self._peer = Peer(cycle, self._outlet)
        cycle.scope["extensions"] = cast(Any, {PEER: self._peer})
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (
            self._hangup_check,
            self._head_limit,
            self._flush_check,
            self._lingering,
            self.timeout_keep_alive_task,
        ):
            if timer is not None:
                timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def _disconnect(self) -> None:
        """Tell the request that runs; forget those that wait."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._peer is not None:
                self._peer.leave()

    def _check_hangup(self) -> None:
        self._hangup_check = None
        if not self.pipeline or self.transport.is_closing():
            return
        if _peer_closed(self.transport):
            self._disconnect()
            self.transport.close()
        else:
            self._hangup_check = self.loop.call_later(_HANGUP_CHECK_S, self._check_hangup)

    # Closing

    def _close(self) -> None:
        """For a request that was answered, or whose application gave up."""
        if self.pipeline:
            # None of them is served.
            self.pipeline.clear()
            assert self._running is not None
            self.cycle = self._running
            still_sent = True
        else:
            still_sent = self.cycle.more_body and not self._busy
        if still_sent and self.transport.can_write_eof() and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_S, self.transport.close)
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._lingering is not None:
            return
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self.flow.resume_reading()
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_when_idle(self.timeout_keep_alive)

    def _look_when_idle(self, after_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(after_s, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """The timer is left: to set and to cancel one for each request takes more than to look at the time when it is
        over."""
        self._idle_since = None

    # Clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_flush()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_when_idle(left_s)
            return
        super().timeout_keep_alive_handler()
        self._watch_flush()

    def _watch_flush(self) -> None:
        if self._flush_check is None:
            self._flush_check = self.loop.call_later(FLUSH_CHECK_S, self._check_flush, None, 0)

    def _check_flush(self, cycle: RequestResponseCycle | None, left_before: int) -> None:
        """``cycle``: the last request at the last look, if it was over."""
        self._flush_check = None
        left = self.transport.get_write_buffer_size()
        if not left:
            return
        over = self.transport.is_closing() or not self._busy
        if over and cycle is self.cycle and left >= left_before:
            self.transport.abort()
            return
        now = self.cycle if over else None
        self._flush_check = self.loop.call_later(FLUSH_CHECK_S, self._check_flush, now, left)


class _TooMany(Exception):
    pass


class _Flow(FlowControl):
    """Lets nobody resume reading while requests wait: each that is answered would let in a thousand more."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


def _peer_closed(transport: asyncio.Transport) -> bool:
    """Whether the peer sends no more, though what it sent before was not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))  # an error or a full hang-up is reported too


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """``app``, whose answers end with the connection unless they tell their length."""

    async def serve(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        length_told = True

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal length_told
            if message["type"] == "http.response.start":
                length_told = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
                if not length_told:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not length_told:
                # uvicorn counts down to zero what is left of the length.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve
