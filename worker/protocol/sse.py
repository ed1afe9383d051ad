"""Server-sent events: an incremental framer over bytes, and the encoder.

Reference: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re

import msgspec

MEDIA_TYPE = "text/event-stream"
DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLarge(Exception):
    """A line or event grew over the framer's limit: the peer is broken or hostile."""


class Event(msgspec.Struct, frozen=True):
    """One dispatched event. ``data`` joins its data lines with a line feed."""

    data: bytes
    event: bytes = b""
    id: bytes = b""


class Comment(msgspec.Struct, frozen=True):
    """A line that began with a colon, without the colon and one space after it."""

    text: bytes


class Framer:
    """Turns chunks of bytes, cut anywhere, into events and comments.

    Lines end in LF, CR or CRLF. ``flush`` dispatches an event whose blank line never came: the standard would drop
    it, but several servers end their last event so, and dropping it would lose the usage of the request.
    ``error_field``: take a line ``error: ...`` for the data of an event named so. The standard has no such field, but
    llama.cpp's server told its errors so until the end of 2025.
    """

    def __init__(self, *, limit: int = 16 * 1024 * 1024, error_field: bool = False) -> None:
        self._limit = limit
        self._error_field = error_field
        self._head: bytes | None = b""
        """The first bytes, until it is known whether they are a byte order mark; then None."""
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._after_cr = False
        self._data: list[bytes] = []
        self._data_size = 0
        self._event = b""
        self._id = b""

    def feed(self, chunk: bytes) -> list[Event | Comment]:
        """Everything that became complete with ``chunk``. Raises EventTooLarge."""
        out: list[Event | Comment] = []
        if self._head is not None:
            chunk = self._head + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._head = chunk
                return out
            self._head = None
            chunk = chunk.removeprefix(_BOM)
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        lines = _LINE_END.split(chunk)
        rest = lines.pop()
        if lines:
            self._after_cr = chunk.endswith(b"\r")
            if self._pending:
                lines[0] = b"".join([*self._pending, lines[0]])
                self._pending.clear()
                self._pending_size = 0
            for line in lines:
                self._line(line, out)
        if rest:
            self._pending.append(rest)
            self._pending_size += len(rest)
            if self._pending_size > self._limit:
                raise EventTooLarge(f"a line is over {self._limit} bytes")
        return out

    def flush(self) -> list[Event | Comment]:
        """What the end of the stream completes."""
        out: list[Event | Comment] = []
        line = (self._head or b"") + b"".join(self._pending)
        self._head = None
        self._pending.clear()
        self._pending_size = 0
        if line:
            self._line(line, out)
        self._dispatch(out)
        return out

    def _line(self, line: bytes, out: list[Event | Comment]) -> None:
        if not line:
            self._dispatch(out)
            return
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if not name and line[:1] == b":":
            out.append(Comment(value))
        elif name == b"data" or (self._error_field and name == b"error"):
            if name == b"error":
                self._event = name
            self._data.append(value)
            self._data_size += len(value) + 1
            if self._data_size > self._limit:
                raise EventTooLarge(f"an event is over {self._limit} bytes")
        elif name == b"event":
            self._event = value
        elif name == b"id":
            self._id = value

    def _dispatch(self, out: list[Event | Comment]) -> None:
        if self._data:
            out.append(Event(b"\n".join(self._data), self._event, self._id))
            self._data = []
            self._data_size = 0
        self._event = b""


def encode_event(data: bytes, *, event: bytes = b"") -> bytes:
    """One event on the wire. ``data`` may hold line feeds."""
    head = b"event: " + event + b"\n" if event else b""
    return head + b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def encode_comment(text: bytes) -> bytes:
    return b": " + text + b"\n\n"
