"""Content codings of an answer, undone as its bytes come and in pieces of bounded size.

gzip and deflate: RFC 1952, RFC 1950; br: RFC 7932; zstd: RFC 8878, its window bounded as RFC 9659 has it. Backends are
asked for ``identity``; some, and proxies before them, compress all the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import brotli
from backports import zstd

PIECE: Final = 16 * 1024
"""Most bytes that are read, and about as many as come out, in one step."""
ZSTD_WINDOW_LOG: Final = 23
"""8 MiB: a frame may name a window of gigabytes, which would be allocated."""


class BadCoding(Exception):
    """The body is not what its content coding says. The message is a clause: "uses a content coding ..."."""


class Decompressor(Protocol):
    """Takes a body in pieces. After each ``feed``, ``take`` until nothing comes out; only then ``feed`` again."""

    def feed(self, data: bytes) -> None: ...

    def take(self) -> bytes:
        """The next bytes of the plain body, a few ``PIECE`` at most. Raises BadCoding."""
        ...

    def end(self) -> None:
        """Raises BadCoding if the body may not end here."""
        ...


def decompressor(codings: Sequence[str]) -> Decompressor | None:
    """For the values of ``content-encoding``; None if the body is plain. One for what is unknown raises when fed."""
    names = [name.strip().lower() for value in codings for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    # One after the other they multiply what few bytes grow to, and nobody needs it.
    make = _KNOWN.get(names[0]) if len(names) == 1 else None
    return _Unknown() if make is None else make()


class _Unknown:
    def __init__(self) -> None:
        self._fed = False

    def feed(self, data: bytes) -> None:
        self._fed = True

    def take(self) -> bytes:
        if self._fed:
            raise BadCoding("compressed its answer in a way that is not known here")
        return b""

    def end(self) -> None: ...


class _Gzip:
    """Members follow one another, as RFC 1952 allows; zeros may pad the end."""

    def __init__(self) -> None:
        self._member: zlib._Decompress | None = None
        self._input = b""
        self._any = False

    def feed(self, data: bytes) -> None:
        self._input += data

    def take(self) -> bytes:
        while True:
            if self._member is None:
                if self._any:
                    self._input = self._input.lstrip(b"\0")
                if not self._input:
                    return b""
                self._member, self._any = zlib.decompressobj(16 + zlib.MAX_WBITS), True
            try:
                out = self._member.decompress(self._input, PIECE)
            except zlib.error as fault:
                raise _broken() from fault
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = None
            else:
                self._input = self._member.unconsumed_tail
            if out or not self._input:
                return out

    def end(self) -> None:
        if self._member is not None:
            raise _breaks_off()


class _Deflate:
    """zlib's format, as RFC 9110 has it, or the bare stream that some servers take the name for."""

    def __init__(self) -> None:
        self._stream: zlib._Decompress | None = None
        self._input = b""

    def feed(self, data: bytes) -> None:
        self._input += data

    def take(self) -> bytes:
        if self._stream is None:
            if len(self._input) < 2:
                return b""
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if _is_zlib(self._input) else -zlib.MAX_WBITS)
        try:
            out = self._stream.decompress(self._input, PIECE)
        except zlib.error as fault:
            raise _broken() from fault
        if self._stream.unused_data:
            raise _broken()
        self._input = self._stream.unconsumed_tail
        return out

    def end(self) -> None:
        if self._input or (self._stream is not None and not self._stream.eof):
            raise _breaks_off()


def _is_zlib(head: bytes) -> bool:
    return head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()
        self._input = b""
        self._any = False

    def feed(self, data: bytes) -> None:
        self._input += data
        self._any = True

    def take(self) -> bytes:
        data, self._input = self._input, b""
        if self._stream.is_finished():
            if data:
                raise _broken()
            return b""
        try:
            out: bytes = self._stream.process(data, output_buffer_limit=PIECE)
        except brotli.error as fault:
            raise _broken() from fault
        return out

    def end(self) -> None:
        if self._any and not self._stream.is_finished():
            raise _breaks_off()


class _Zstd:
    """Frames follow one another."""

    def __init__(self) -> None:
        self._frame: zstd.ZstdDecompressor | None = None
        self._input = b""

    def feed(self, data: bytes) -> None:
        self._input += data

    def take(self) -> bytes:
        while True:
            if self._frame is None:
                if not self._input:
                    return b""
                options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
                self._frame = zstd.ZstdDecompressor(options=options)
            data, self._input = self._input, b""
            try:
                out = self._frame.decompress(data, PIECE)
            except zstd.ZstdError as fault:
                raise _broken() from fault
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
            if out or not self._input:
                return out

    def end(self) -> None:
        if self._frame is not None:
            raise _breaks_off()


def _broken() -> BadCoding:
    return BadCoding("sent an answer whose compression is broken")


def _breaks_off() -> BadCoding:
    return BadCoding("sent a compressed answer that breaks off")


_KNOWN: Final[dict[str, Callable[[], Decompressor]]] = {
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}
