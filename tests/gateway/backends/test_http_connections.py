"""Which connection a request takes, and what becomes of connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.backends import http_pool
from gateway.backends.decompression import PIECE
from gateway.backends.faults import BackendFault
from gateway.backends.transport import Transport
from tests.gateway.backends.http_support import (
    WHOLE,
    Peer,
    RawServer,
    answers,
    asked,
    gone,
    left_over,
    request,
    says,
    whole,
)
from tests.gateway.backends.relay_support import black_hole, eventually

MakeServer = Callable[..., RawServer]


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    async with Transport() as opened:
        yield opened


def open_connections(transport: Transport) -> int:
    assert transport._pool is not None
    return len(transport._pool._open)


async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins an answer that does not end."""
    await request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
    await gone(reader)


async def test_a_connection_is_used_again(transport: Transport, raw_server: MakeServer) -> None:
    server = await raw_server(answers(WHOLE, b"HTTP/1.1 204 No\r\n\r\n", WHOLE)).start()
    bodies = [await whole(await asked(transport, server.url + path)) for path in ("", "/a", "/b?c", "")]
    assert bodies == [b"ok", b"", b"ok", b"ok"]
    assert (server.connections, open_connections(transport)) == (1, 1)


async def test_requests_at_once_have_a_connection_each_and_keep_them(
    transport: Transport, raw_server: MakeServer
) -> None:
    server = await raw_server(answers(WHOLE)).start()
    for _ in range(2):
        replies = await asyncio.gather(*(asked(transport, server.url) for _ in range(50)))
        assert [await whole(reply) for reply in replies] == [b"ok"] * 50
    assert server.connections == 50


async def test_a_backend_that_hangs_holds_up_no_other(transport: Transport, raw_server: MakeServer) -> None:
    hanging, good = await raw_server(waits).start(), await raw_server(answers(WHOLE)).start()
    held = await asyncio.gather(*(asked(transport, hanging.url) for _ in range(80)))
    assert await whole(await asked(transport, good.url)) == b"ok"
    assert await whole(await asked(transport, good.url)) == b"ok"
    for reply in held:
        reply.close()
    await eventually(lambda: open_connections(transport) == 1)


async def test_what_was_not_read_of_an_answer_stays_with_it(transport: Transport, raw_server: MakeServer) -> None:
    big = b"HTTP/1.1 200 OK\r\ncontent-length: 50000\r\n\r\n" + b"x" * 50_000
    server = await raw_server(answers(big, WHOLE)).start()
    first = await asked(transport, server.url)
    await eventually(lambda: first._answer.end is not None)
    second = await asked(transport, server.url)
    assert await whole(second) == b"ok"
    first.close()  # which is no matter of its connection any more
    assert await whole(first) == b"x" * 50_000
    assert await whole(await asked(transport, server.url)) == b"ok"
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: Close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nconnection: close\r\n\r\n",
        WHOLE + b"HTTP/1.1 200",
        WHOLE + WHOLE,
        WHOLE + b"?",
    ],
)
async def test_a_connection_that_is_not_used_again(transport: Transport, raw_server: MakeServer, answer: bytes) -> None:
    server = await raw_server(answers(answer)).start()
    for _ in range(3):
        assert await whole(await asked(transport, server.url)) == b"ok"
    assert server.connections == 3
    await eventually(lambda: open_connections(transport) == 0)
    await eventually(lambda: server.ended == 3)


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", b"\r\n", b""])
async def test_an_idle_connection_on_which_something_came(
    transport: Transport, raw_server: MakeServer, unasked: bytes
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(WHOLE)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(unasked)
        if not unasked:
            writer.write_eof()
        await gone(reader)

    server = await raw_server(script).start()
    for _ in range(2):
        assert await whole(await asked(transport, server.url)) == b"ok"
        await eventually(lambda: open_connections(transport) == 0)
    await eventually(lambda: server.ended == 2)
    assert server.connections == 2


@pytest.mark.parametrize("unasked", [(WHOLE.replace(b"ok", b"no"), b""), (b"",)], ids=["answer", "end"])
async def test_what_came_on_an_idle_connection_and_was_not_seen_yet(
    transport: Transport, unasked: tuple[bytes, ...]
) -> None:
    """It is no answer to the next request, nor is that one lost with a connection that was closed."""
    with Peer(WHOLE, *unasked) as peer:
        asking = asyncio.ensure_future(asked(transport, peer.url))
        await asyncio.to_thread(peer.act)
        assert await whole(await asking) == b"ok"
        assert transport._pool is not None
        ((origin, (idle,)),) = transport._pool._idle.items()
        assert idle.quiet
        peer.act()
        assert transport._pool.take(origin) is None
    await eventually(lambda: open_connections(transport) == 0)


async def test_an_idle_connection_is_closed(
    transport: Transport, raw_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pool, "IDLE_CONNECTION_S", 0.1)
    server = await raw_server(answers(WHOLE)).start()
    for _ in range(2):
        replies = await asyncio.gather(*(asked(transport, server.url) for _ in range(5)))
        assert [await whole(reply) for reply in replies] == [b"ok"] * 5
        await eventually(lambda: server.ended == server.connections)
        assert transport._pool is not None
        assert (open_connections(transport), transport._pool._idle, transport._pool._sweeping) == (0, {}, None)
    assert server.connections == 10


async def test_one_that_idled_too_long_is_not_used_though_the_timer_is_late(
    transport: Transport, raw_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await raw_server(answers(WHOLE)).start()
    await whole(await asked(transport, server.url))
    monkeypatch.setattr(http_pool, "IDLE_CONNECTION_S", 0.0)
    await whole(await asked(transport, server.url))
    assert server.connections == 2


@pytest.mark.parametrize("first", [WHOLE, b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 304 No\r\n\r\n"])
async def test_a_connection_that_closes_as_it_is_used(
    transport: Transport, raw_server: MakeServer, first: bytes
) -> None:
    """A GET is sent again; of others the relay decides, for they may have been heard."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(first)
        await request(reader)

    server = await raw_server(script).start()
    await whole(await asked(transport, server.url))
    with pytest.raises(BackendFault) as caught:
        await asked(transport, server.url)
    assert caught.value.lost_early
    assert server.connections == 1
    for _ in range(2):
        await whole(await transport.get(server.url, headers={}, connect_s=5.0))
    assert server.connections == 3


async def test_a_get_on_a_fresh_connection_is_sent_once(transport: Transport, raw_server: MakeServer) -> None:
    server = await raw_server(says(b"")).start()
    with pytest.raises(BackendFault) as caught:
        await transport.get(server.url, headers={}, connect_s=5.0)
    assert caught.value.lost_early
    assert server.connections == 1


async def test_an_answer_that_is_closed_closes_its_connection(transport: Transport, raw_server: MakeServer) -> None:
    server = await raw_server(waits).start()
    reply = await asked(transport, server.url)
    assert await reply.read_some() == b"ok"
    reply.close()
    await eventually(lambda: server.ended == 1)
    with pytest.raises(BackendFault):
        await reply.read_some()
    assert open_connections(transport) == 0


async def test_finishing_keeps_the_connection_if_the_end_comes_soon(
    transport: Transport, raw_server: MakeServer
) -> None:
    finishing = asyncio.Semaphore(0)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for ends in (True, True, False):
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
            await finishing.acquire()
            writer.write(b"5\r\n: end\r\n0\r\n\r\n" if ends else b"5\r\n: end\r\n")
        await gone(reader)

    server = await raw_server(script).start()
    for number in range(3):
        reply = await asked(transport, server.url)
        assert await reply.read_some() == b"ok"
        asyncio.get_running_loop().call_later(0.01, finishing.release)
        await reply.finish(within_s=5.0 if number < 2 else 0.05)
        assert open_connections(transport) == 1 or number == 2
    await eventually(lambda: server.ended == 1)
    await eventually(lambda: open_connections(transport) == 0)
    assert server.connections == 1


async def test_finishing_what_has_ended_waits_for_nothing(transport: Transport, raw_server: MakeServer) -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"
    for answer in (WHOLE, cut):
        server = await raw_server(says(answer)).start()
        reply = await asked(transport, server.url)
        await eventually(lambda reply=reply: reply._answer.end is not None)
        await reply.finish(within_s=0.0)
        assert await reply.read_some() == b"ok"


async def test_cancelled_while_it_waits_for_the_head(transport: Transport, raw_server: MakeServer) -> None:
    asked_for = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        asked_for.set()
        await gone(reader)

    server = await raw_server(silent).start()
    asking = asyncio.ensure_future(asked(transport, server.url))
    await asked_for.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: server.ended == 1)
    assert open_connections(transport) == 0


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_at_any_turn(transport: Transport, raw_server: MakeServer, turns: int) -> None:
    server = await raw_server(waits).start()
    for host in ("127.0.0.1", "localhost"):
        asking = asyncio.ensure_future(asked(transport, f"http://{host}:{server.port}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        if not asking.cancelled():
            asking.result().close()
    await eventually(lambda: open_connections(transport) == 0)
    await eventually(lambda: server.ended == server.connections)


async def test_cancelled_while_it_connects(transport: Transport) -> None:
    async with black_hole() as url:
        asking = asyncio.ensure_future(asked(transport, url))
        await asyncio.sleep(0.05)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert open_connections(transport) == 0


async def test_the_limit_of_connecting(transport: Transport) -> None:
    async with black_hole() as url:
        with pytest.raises(BackendFault) as caught:
            await asked(transport, url, connect_s=0.05)
    assert caught.value.unreachable
    assert open_connections(transport) == 0


async def test_closing_closes_all_connections(raw_server: MakeServer) -> None:
    busy, idle = await raw_server(waits).start(), await raw_server(answers(WHOLE)).start()
    async with Transport() as transport, black_hole() as nowhere:
        await whole(await asked(transport, idle.url))
        reply = await asked(transport, busy.url)
        assert await reply.read_some() == b"ok"
        reading = asyncio.ensure_future(reply.read_some())
        connecting = asyncio.ensure_future(asked(transport, nowhere, connect_s=0.2))
        await asyncio.sleep(0.01)
        await transport.__aexit__(None, None, None)
        with pytest.raises(BackendFault):
            await reading
        await eventually(lambda: busy.ended == idle.ended == 1)
        with pytest.raises(BackendFault):
            await connecting
        with pytest.raises(RuntimeError, match="not open"):
            await asked(transport, idle.url)


async def test_nothing_is_left_to_the_garbage_collector(transport: Transport, raw_server: MakeServer) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n2\r\nok\r\n"
    endings = {"read": b"0\r\n\r\n", "closed": b"", "cut": b"", "malformed": b"xx\r\n", "cancelled": b""}

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for, _ = await request(reader)
        how = asked_for.split()[1].decode().strip("/")
        writer.write(head + endings[how])
        if how in ("closed", "cancelled"):
            await gone(reader)

    server = await raw_server(script).start()
    gc.collect()
    before = left_over()
    gc.disable()
    try:
        for how in endings:
            reply = await asked(transport, f"{server.url}/{how}")
            assert await reply.read_some() == b"ok"
            with contextlib.suppress(BackendFault, TimeoutError):
                async with asyncio.timeout(0.01 if how == "cancelled" else 0.0 if how == "closed" else 5.0):
                    await whole(reply)
            reply.close()
        del reply
        await asyncio.sleep(0.01)
        await eventually(lambda: len(left_over()) <= len(before))
    finally:
        gc.enable()


async def test_a_large_answer_comes_piece_by_piece(transport: Transport, raw_server: MakeServer) -> None:
    body = b"".join(b"%07d\n" % number for number in range(200_000))
    server = await raw_server(says(b"HTTP/1.1 200 OK\r\n\r\n" + body)).start()
    reply = await asked(transport, server.url)
    found = []
    while piece := await reply.read_some():
        found.append(piece)
    assert b"".join(found) == body
    assert max(map(len, found)) <= PIECE
