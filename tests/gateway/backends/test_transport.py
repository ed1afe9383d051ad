"""HTTP to backends: what is read, how much at once, and what is not believed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from typing import Any

import brotli
import pytest
from backports import zstd

from gateway.backends.decompression import PIECE
from gateway.backends.faults import BackendFault
from gateway.backends.http_connection import READ_AHEAD
from gateway.backends.transport import Reply, Transport
from tests.gateway.backends.relay_support import Rig, eventually, read, read_until_fault, token
from worker.protocol.sse import DONE, encode_event

CODINGS = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstd.compress}


async def asked(transport: Transport, url: str) -> Reply:
    return await transport.post(url, headers={"accept-encoding": "identity"}, body=b"{}", connect_s=2.0)


def compressed_stream(coding: str, events: list[bytes]) -> list[bytes]:
    """As a server sends it that flushes after each event."""
    if coding == "br":
        packer = brotli.Compressor()
        return [packer.process(event) + packer.flush() for event in events] + [packer.finish()]
    if coding == "zstd":
        frame = zstd.ZstdCompressor()
        flushed = [frame.compress(event, zstd.ZstdCompressor.FLUSH_BLOCK) for event in events]
        return [*flushed, frame.flush()]
    deflating = zlib.compressobj(wbits=zlib.MAX_WBITS + (16 if coding == "gzip" else 0))
    return [deflating.compress(event) + deflating.flush(zlib.Z_SYNC_FLUSH) for event in events] + [deflating.flush()]


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_stream_comes_event_by_event(rig: Rig, upstream: Any, coding: str) -> None:
    read_first = asyncio.Event()
    first, *rest = compressed_stream(
        coding, [encode_event(token("Pä")), encode_event(token("ris")), encode_event(DONE)]
    )

    async def answer(c: Any) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        await c.send(f"{head}content-encoding: {coding}\r\nconnection: close\r\n\r\n".encode())
        await c.send_piece(first)
        await read_first.wait()
        for piece in rest:
            for byte in piece:
                await c.send_piece(bytes([byte]))
        await c.send(b"0\r\n\r\n")

    rig.use((await upstream(answer)).url)
    async with rig.open() as exchange:
        assert await exchange.events() == [token("Pä")]
        read_first.set()
        found = await exchange.events()
        while not exchange.complete:
            found += await exchange.events()
        assert found == [token("ris")]


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_refusal_is_read(rig: Rig, upstream: Any, coding: str) -> None:
    body = b'{"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}'

    async def refuses(c: Any) -> None:
        await c.status(400, CODINGS[coding](body), more=f"content-encoding: {coding}\r\n")

    rig.use((await upstream(refuses)).url)
    _, fault = await read_until_fault(rig.open())
    assert (fault.error().status, fault.error().encode()) == (400, body)


@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize("coding", ["gzip", "snappy"])
async def test_what_cannot_be_unpacked_is_a_fault_that_its_status_still_explains(
    rig: Rig, upstream: Any, status: int, coding: str
) -> None:
    async def answers(c: Any) -> None:
        more = f"content-encoding: {coding}\r\n"
        media_type = "text/event-stream" if status == 200 else "application/json"
        await c.status(status, b"no such thing", media_type=media_type, more=more)

    rig.use((await upstream(answers)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.code == {200: "backend_protocol_error", 400: "backend_error", 503: "engine_overloaded"}[status]


async def test_an_error_that_grows_without_end_is_not_read(rig: Rig, upstream: Any) -> None:
    async def bomb(c: Any) -> None:
        await c.status(500, gzip.compress(bytes(50_000_000)), more="content-encoding: gzip\r\n")

    rig.use((await upstream(bomb)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.code == "backend_error"


async def test_a_redirect_is_a_fault_and_never_followed(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    elsewhere, good = await upstream(answer), await upstream(answer)
    for status in (301, 302, 303, 307, 308, 204):

        async def redirects(c: Any, status: int = status) -> None:
            await c.status(status, b"", more=f"location: {elsewhere.url}/\r\n")

        rig.use((await upstream(redirects)).url, good.url, in_turn=True)
        exchange = rig.open()
        await read(exchange)
        assert exchange.failed_attempts == ["w0 backend_protocol_error"]
        rig.relay.balancer.keep_only([])
    assert not elsewhere.seen


async def test_cookies_are_not_kept(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        await c.send(head + b"set-cookie: a=b\r\ntransfer-encoding: chunked\r\n\r\n")
        await c.token("a", 1)
        await c.done()

    server = await upstream(answer, keep_alive=True)
    rig.use(server.url)
    for _ in range(2):
        await read(rig.open())
    sent = server.seen[1].headers
    assert server.connections == 1
    assert "cookie" not in sent
    assert "user-agent" not in sent
    assert sent["accept-encoding"] == "identity"


async def test_what_comes_unasked_on_an_idle_connection_is_no_answer_to_the_next_request(
    rig: Rig, upstream: Any
) -> None:
    """Proxies say 408 there; worse would be what belongs to another request."""

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()
        await asyncio.sleep(0.05)
        await c.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    server = await upstream(answer, keep_alive=True)
    rig.use(server.url)
    for _ in range(2):
        exchange = rig.open()
        await read(exchange)
        assert exchange.attempts == 1
        await asyncio.sleep(0.1)
    assert server.connections == 2


async def test_what_came_before_a_cut_is_read_first(upstream: Any) -> None:
    body = b"x" * 3 * PIECE

    async def cut(c: Any) -> None:
        await c.begin()
        await c.send_piece(body)
        c.reset()

    server = await upstream(cut)
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        await eventually(lambda: reply._answer.end is not None)
        found = b""
        while len(found) < len(body):
            found += await reply.read_some()
        with pytest.raises(BackendFault, match="broke off"):
            await reply.read_some()
        reply.close()
    assert found == body


async def test_a_reply_that_is_not_read_makes_its_backend_wait(upstream: Any) -> None:
    sent = 0

    async def endless(c: Any) -> None:
        nonlocal sent
        await c.begin()
        with contextlib.suppress(ConnectionError):
            while True:
                await c.send_piece(b"x" * 10_000)
                sent += 10_000

    server = await upstream(endless)
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        stands_at = -1
        while stands_at != sent:
            stands_at = sent
            await asyncio.sleep(0.1)
        assert len(reply._answer.body) <= 2 * READ_AHEAD + 256 * 1024  # what one read of the socket may bring
        for _ in range(3 * stands_at // PIECE):
            assert len(await reply.read_some()) <= PIECE
        assert sent > stands_at  # it goes on when it is read
        reply.close()


async def test_many_events_at_once_let_others_run_in_between(rig: Rig, upstream: Any) -> None:
    event = encode_event(b"{}")
    many = event * (400_000 // len(event))

    async def bursts(c: Any) -> None:
        await c.begin()
        await c.send_piece(many)
        await c.event(b"[DONE]")

    rig.use((await upstream(bursts)).url)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.ensure_future(other())
    async with rig.open() as exchange:
        assert await exchange.events()
        await asyncio.sleep(0.1)  # the rest of it waits in memory
        most, before = 0, turns
        while not exchange.complete:
            most = max(most, len(await exchange.events()))
        gave_way = turns - before
    others.cancel()
    assert most <= PIECE // len(event) + 1
    assert gave_way >= READ_AHEAD // PIECE
