"""What the transport makes of what a backend sends, whole or not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backends.decompression import PIECE
from gateway.backends.faults import BackendFault
from gateway.backends.http_answer import Answer
from gateway.backends.http_connection import HEAD_LIMIT, MOST_HEADERS, READ_AHEAD, Connection, Origin
from gateway.backends.transport import Reply, Transport
from tests.gateway.backends.http_support import RawServer, answers, asked, gone, request, says, whole
from tests.gateway.backends.relay_support import eventually

MakeServer = Callable[..., RawServer]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
DISCONNECTED, MALFORMED = "backend_disconnected", "backend_protocol_error"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (OK + b"content-length: 0\r\n\r\n", 200, b""),
        (OK + b"Content-Length:2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok", 200, b"ok"),
        (CHUNKED + b"2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (CHUNKED + b"1;a=b\r\no\r\n1 \r\nk\r\n0;c\r\nlast: 1\r\nx: y\r\n\r\n", 200, b"ok"),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (OK + b"\r\nuntil it closes", 200, b"until it closes"),
        (OK + b"transfer-encoding: identity\r\n\r\nuntil it closes", 200, b"until it closes"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil it closes", 200, b"until it closes"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 204 No\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 No\r\ncontent-length: 5\r\n\r\n", 304, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (
            b"HTTP/1.1 103 Hints\r\nlink: a\r\ncontent-type: x/y\r\n\r\n" * 3 + CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
            200,
            b"ok",
        ),
        (b"HTTP/1.1 104 Upload\r\nx: y\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", 200, b"ok"),
        (OK + b"upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno and more", 503, b"no"),
    ],
)
async def test_answers(raw_server: MakeServer, answer: bytes, status: int, body: bytes) -> None:
    server = await raw_server(says(answer)).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        assert (reply.status, reply.media_type, await whole(reply)) == (status, "", body)


@pytest.mark.parametrize(
    ("answer", "code", "early"),
    [
        (b"", DISCONNECTED, True),
        (b"HTTP/1.1 2", DISCONNECTED, False),
        (OK + b"content-length: 2\r\n", DISCONNECTED, False),
        (b"HTTP/1.1 100 Continue\r\n\r\n", DISCONNECTED, False),
        (b"garbage\r\n\r\n", MALFORMED, False),
        (b"\x16\x03\x01\x02\x00\x01\x00", MALFORMED, False),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", MALFORMED, False),
        (b"HTTP/1.1 101 Switching\r\n\r\n", MALFORMED, False),
        (b"HTTP/1.1 104 Upload\r\ncontent-length: 3\r\n\r\nbad" + OK + b"content-length: 0\r\n\r\n", MALFORMED, False),
        (b"HTTP/1.1 199 What\r\ntransfer-encoding: chunked\r\n\r\n3\r\nbad\r\n0\r\n\r\n", MALFORMED, False),
        (b"HTTP/1.1 600 What\r\ncontent-length: 0\r\n\r\n", MALFORMED, False),
        (b"HTTP/1.1 099 What\r\ncontent-length: 0\r\n\r\n", MALFORMED, False),
        (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok", MALFORMED, False),
        (OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", MALFORMED, False),
        (OK + b"content-length: -2\r\n\r\nok", MALFORMED, False),
        (OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", MALFORMED, False),
        (OK + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\nok", MALFORMED, False),
        (OK + b"a: %b\r\ncontent-length: 0\r\n\r\n" % (b"x" * HEAD_LIMIT), MALFORMED, False),
        (OK + b"a: %b" % (b"x" * 2 * HEAD_LIMIT), MALFORMED, False),
        (OK + b"".join(b"h%d: 1\r\n" % n for n in range(MOST_HEADERS + 1)) + b"\r\n", MALFORMED, False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * (HEAD_LIMIT // 20), MALFORMED, False),
    ],
)
async def test_what_is_no_answer(raw_server: MakeServer, answer: bytes, code: str, early: bool) -> None:
    server = await raw_server(says(answer)).start()
    async with Transport() as transport:
        with pytest.raises(BackendFault) as caught:
            await asked(transport, server.url)
        assert (caught.value.code, caught.value.lost_early) == (code, early)
        assert transport._pool is not None
        await eventually(lambda: not transport._pool._open)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (OK + b"content-length: 4\r\n\r\nok", DISCONNECTED),
        (CHUNKED + b"2\r\nok\r\n", DISCONNECTED),
        (CHUNKED + b"2\r\nok\r\n0\r\n", DISCONNECTED),
        (CHUNKED + b"4\r\nok", DISCONNECTED),
        (CHUNKED + b"2\r\nok\r\nzz\r\n", MALFORMED),
        (CHUNKED + b"2\r\nokay\r\n", MALFORMED),
        (CHUNKED + b"2\r\nok\r\n1;" + b"x" * 10 * HEAD_LIMIT, MALFORMED),
        (CHUNKED + b"2\r\nok\r\n0\r\ntrailer: " + b"x" * 10 * HEAD_LIMIT, MALFORMED),
    ],
)
async def test_a_body_that_ends_badly(raw_server: MakeServer, answer: bytes, code: str) -> None:
    """What came before is read first."""
    server = await raw_server(says(answer)).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        await eventually(lambda: reply._answer.end is not None)
        assert reply.came
        assert await reply.read_some() == b"ok"
        for _ in range(2):
            with pytest.raises(BackendFault) as caught:
                await reply.read_some()
            assert (caught.value.code, caught.value.lost_early) == (code, False)
        reply.close()


async def test_headers(raw_server: MakeServer) -> None:
    head = (
        b"Content-Type: Text/Event-Stream ; charset=utf-8\r\nRetry-After: 5 \r\nretry-after: 6\r\nx-empty:\r\n"
        b"x-latin: \xe9\r\ncontent-encoding: identity\r\nContent-Encoding: snappy\r\ncontent-length: 2\r\n\r\nok"
    )
    server = await raw_server(says(OK + head)).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        assert reply.media_type == "text/event-stream"
        assert reply.header("Retry-After") == reply.header("retry-after") == "5"
        assert (reply.header("x-empty"), reply.header("x-latin"), reply.header("x-none")) == ("", "\xe9", None)
        with pytest.raises(BackendFault, match="not known here"):
            await reply.read_some()


async def test_what_came_needs_no_waiting(raw_server: MakeServer) -> None:
    more = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(CHUNKED)
        await more.wait()
        writer.write(b"2\r\nok\r\n0\r\n\r\n")
        await gone(reader)

    server = await raw_server(script).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        assert not reply.came
        more.set()
        await eventually(lambda: reply.came)
        assert await reply.read_some() == b"ok"
        assert reply.came
        assert await reply.read_some() == b""


async def test_a_cancelled_read_loses_nothing(raw_server: MakeServer) -> None:
    more = asyncio.Queue[bytes]()
    sent = [bytes([number]) * 100 for number in range(100)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % sum(map(len, sent)))
        while piece := await more.get():
            writer.write(piece)
        await gone(reader)

    server = await raw_server(script).start()
    found = b""
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        for number, piece in enumerate(sent):
            reading = asyncio.ensure_future(reply.read_some())
            more.put_nowait(piece)
            for _ in range(number % 6):  # before, as, and after it comes
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                found += reading.result()
        found += await whole(reply)
        more.put_nowait(b"")
    assert found == b"".join(sent)


@pytest.mark.parametrize("size", [1, 10_000, 5 * READ_AHEAD])
@pytest.mark.parametrize("framed", ["chunked", "until it closes"])
async def test_an_endless_answer_waits_until_it_is_read(raw_server: MakeServer, framed: str, size: int) -> None:
    sent, asked_for = 0, 1024 * 1024
    pieces = max(1, 4096 // size)
    one = b"%x\r\n%b\r\n" % (size, b"x" * size) if framed == "chunked" else b"x" * size

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(CHUNKED if framed == "chunked" else OK + b"\r\n")
        while not writer.is_closing():
            writer.write(one * pieces)
            try:
                await writer.drain()
            except ConnectionError:
                return
            sent += size * pieces

    server = await raw_server(endless).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        (connection,) = transport._pool._open  # type: ignore[union-attr]
        await eventually(lambda: connection._reading_paused)
        waiting = len(reply._answer.body)
        # What one read of a socket may bring comes on top.
        assert 2 * READ_AHEAD < waiting <= 2 * READ_AHEAD + 256 * 1024
        found = 0
        while found < asked_for:
            piece = await reply.read_some()
            assert 0 < len(piece) <= PIECE
            assert len(reply._answer.body) <= 2 * READ_AHEAD + 256 * 1024
            found += len(piece)
        reply.close()
        await eventually(lambda: server.ended == 1)


async def test_an_answer_that_was_complete_while_paused_frees_its_connection(raw_server: MakeServer) -> None:
    size = 1024 * 1024
    server = await raw_server(answers(OK + b"content-length: %d\r\n\r\n" % size + b"x" * size)).start()
    async with Transport() as transport:
        for _ in range(3):
            reply = await asked(transport, server.url)
            await asyncio.sleep(0.01)
            assert len(await whole(reply)) == size
    assert server.connections == 1


# Any cut of the bytes gives the same. These go to a connection of its own, over a pair of sockets.


async def received(pieces: Sequence[bytes]) -> tuple[int, bytes, str | None]:
    """Status, body and fault of what comes in ``pieces``, after which the peer closes."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    connection = Connection(Origin(False, "h", 1), loop, released=lambda _: None, lost=lambda _: None)
    with there:
        await loop.create_connection(lambda: connection, sock=here)
        answer = connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
        await asyncio.sleep(0)
        there.recv(1000)  # closed with something unread, it would be reset
        for piece in pieces:
            there.send(piece)
            for _ in range(3):
                await asyncio.sleep(0)
    body, fault = await _read(answer)
    connection.abort()
    await asyncio.sleep(0)
    return answer.status, body, fault


async def _read(answer: Answer) -> tuple[bytes, str | None]:
    body = b""
    try:
        await answer.head()
        while piece := await Reply(answer).read_some():
            body += piece
    except BackendFault as fault:
        return body, fault.code
    return body, None


def framed(framing: str, body: bytes, cuts: Sequence[int]) -> bytes:
    if framing == "length":
        return OK + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    if framing == "close":
        return b"HTTP/1.0 200 OK\r\ncontent-type: a/b\r\n\r\n" + body
    at = sorted({0, *(cut % (len(body) + 1) for cut in cuts), len(body)})
    chunks = [body[start:end] for start, end in pairwise(at)]
    return CHUNKED + b"".join(b"%X;x=%d\r\n%b\r\n" % (len(c), len(c), c) for c in chunks) + b"0\r\nt: 1\r\n\r\n"


FRAMINGS = ("length", "chunked", "close")


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_cut_at_every_byte(framing: str) -> None:
    body = b"data: one\r\n\r\ndata: 0\r\n\r\nHTTP/1.1 200 OK\r\n"
    answer = b"HTTP/1.1 103 Hints\r\na: b\r\n\r\n" + framed(framing, body, [3, 17])
    for at in range(1, len(answer)):
        assert await received([answer[:at], answer[at:]]) == (200, body, None)
    assert await received([bytes([byte]) for byte in answer]) == (200, body, None)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_broken_off_at_every_byte(framing: str) -> None:
    body = b"0123456789"
    answer = framed(framing, body, [4])
    for at in range(len(answer)):
        status, found, fault = await received([answer[:at]] if at else [])
        assert fault == DISCONNECTED
        assert body.startswith(found)
        assert status == 0 or b"\r\n\r\n" in answer[:at]


@settings(max_examples=60, deadline=None)
@given(
    framing=st.sampled_from(FRAMINGS),
    body=st.binary(max_size=300) | st.binary(min_size=1, max_size=8).map(lambda b: b * 10_000),
    chunks=st.lists(st.integers(0, 100_000), max_size=30),
    cuts=st.lists(st.floats(0, 1), max_size=12),
)
def test_cut_anywhere(framing: str, body: bytes, chunks: list[int], cuts: list[float]) -> None:
    answer = framed(framing, body, chunks)
    at = sorted({0, *(int(cut * len(answer)) for cut in cuts), len(answer)})
    pieces = [answer[start:end] for start, end in pairwise(at)]
    assert asyncio.run(received(pieces)) == (200, body, None)
