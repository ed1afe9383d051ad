"""What the transport writes, and how."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from gateway.backends.faults import BackendFault
from gateway.backends.http_connection import WRITTEN_AT_ONCE, WRITTEN_WITH_HEAD, Connection
from gateway.backends.transport import Transport
from tests.gateway.backends.http_support import WHOLE, Peer, RawServer, asked, request, whole
from tests.gateway.backends.relay_support import eventually

MakeServer = Callable[..., RawServer]


def recording(seen: list[bytes]) -> Any:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await request(reader)
            seen.append(head + body)
            writer.write(WHOLE)

    return script


async def test_a_request_is_what_was_given_with_host_and_length(raw_server: MakeServer) -> None:
    seen: list[bytes] = []
    server = await raw_server(recording(seen)).start()
    headers = {"Authorization": "Bearer é", "x-empty": "", "x-tab": "a\tb"}
    async with Transport() as transport:
        await transport.post(server.url + "/v1/chat", headers=headers, body=b'{"a":1}', connect_s=5.0)
        await transport.post(server.url, headers={}, body=b"", connect_s=5.0)
        await transport.get(server.url + "/health", headers={"a": "b"}, connect_s=5.0)
    host = f"Host: 127.0.0.1:{server.port}\r\n"
    given = "Authorization: Bearer é\r\nx-empty: \r\nx-tab: a\tb\r\n"
    assert [one.decode() for one in seen] == [
        f'POST /v1/chat HTTP/1.1\r\n{host}{given}Content-Length: 7\r\n\r\n{{"a":1}}',
        f"POST / HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n",
        f"GET /health HTTP/1.1\r\n{host}a: b\r\n\r\n",
    ]


async def test_a_small_request_is_one_write(raw_server: MakeServer) -> None:
    writes: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writes.append(len(await reader.read(2**20)))
        writer.write(WHOLE)

    server = await raw_server(script).start()
    async with Transport() as transport:
        await whole(await asked(transport, server.url, b"x" * 1000))
    assert writes[0] > 1000


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("", "/"),
        ("/v1/models?limit=1000", "/v1/models?limit=1000"),
        ("/é x", "/%C3%A9%20x"),
        ("/a%20b", "/a%20b"),
        ("/a/../b", "/b"),
        ("/v1#part", "/v1"),
        ("/a\r\nx: y", "/ax:%20y"),
    ],
)
async def test_paths(raw_server: MakeServer, path: str, target: str) -> None:
    seen: list[bytes] = []
    server = await raw_server(recording(seen)).start()
    async with Transport() as transport:
        await asked(transport, server.url + path)
    head = f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\na: b\r\nContent-Length: 2\r\n\r\n"
    assert seen == [head.encode() + b"{}"]


@pytest.mark.parametrize(("host", "sent"), [("localhost", "localhost"), ("LOCALHOST", "localhost"), ("[::1]", "[::1]")])
async def test_names_and_addresses(raw_server: MakeServer, host: str, sent: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    seen: list[bytes] = []
    try:
        server = await raw_server(recording(seen), host=host.strip("[]").lower()).start()
    except OSError:
        pytest.skip(f"{host} is no address here")
    async with Transport() as transport:
        for _ in range(2):
            assert await whole(await asked(transport, f"http://{host}:{server.port}/")) == b"ok"
    assert f"\r\nHost: {sent}:{server.port}\r\n".encode() in seen[0]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://127.0.0.1/",
            "no-host",
            "http://",
            "http:///v1",
            "//127.0.0.1/v1",
            "http://127.0.0.1:x/",
            "http://[::1/",
        ),
        *("http://127.0.0.1:99999/", "http://a b/", "http://user:secret@127.0.0.1/", "http://user@127.0.0.1/"),
        *("http://127.0.0.1:0/", "http://a..b.invalid/", "http://nowhere.invalid/", "http://b\u00fccher.invalid/"),
        f"http://{'a' * 300}.invalid/",
    ],
)
async def test_what_cannot_be_reached(url: str) -> None:
    async with Transport() as transport:
        with pytest.raises(BackendFault) as caught:
            await asked(transport, url)
    assert caught.value.unreachable
    assert "secret" not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "header", [("a", "b\r\nc: d"), ("a", "b\n"), ("a\r", "b"), ("a", "\0"), ("a", "\x7f"), ("a", "\ud800")]
)
async def test_a_header_that_would_be_two_is_not_sent(raw_server: MakeServer, header: tuple[str, str]) -> None:
    server = await raw_server(recording([])).start()
    async with Transport() as transport:
        with pytest.raises(BackendFault) as caught:
            await transport.post(server.url, headers=dict([header]), body=b"", connect_s=5.0)
    assert caught.value.unreachable
    assert not server.connections


async def test_proxies_of_the_environment_are_not_used(raw_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = await raw_server(recording([])).start()
    async with Transport() as transport:
        assert await whole(await asked(transport, server.url)) == b"ok"


async def test_a_large_body_waits_for_a_slow_backend_and_holds_up_nobody(raw_server: MakeServer) -> None:
    body = hashlib.shake_128(b"a body").digest(32 * 1024 * 1024)
    may_read = asyncio.Event()
    found = hashlib.sha256()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await may_read.wait()
        left = len(body)
        while left:
            piece = await reader.read(2**20)
            found.update(piece)
            left -= len(piece)
        writer.write(WHOLE)
        await writer.drain()

    server = await raw_server(slow).start()
    turns, most = 0, 0
    async with Transport() as transport:
        asking = asyncio.ensure_future(asked(transport, server.url, body))
        connection: Connection | None = None
        while not asking.done():
            await asyncio.sleep(0)
            turns += 1
            if transport._pool is not None and transport._pool._open:
                (connection,) = transport._pool._open
                if connection._transport is not None:
                    most = max(most, connection._transport.get_write_buffer_size())
                    if connection._writing_paused:
                        may_read.set()
        assert await whole(await asking) == b"ok"
    assert found.digest() == hashlib.sha256(body).digest()
    assert 0 < most <= 3 * WRITTEN_WITH_HEAD
    assert turns >= len(body) // WRITTEN_AT_ONCE


@pytest.mark.parametrize("closing", ["connection: close\r\n", ""])
async def test_an_answer_that_comes_before_the_body_was_sent_is_read(raw_server: MakeServer, closing: str) -> None:
    body = b"x" * 32 * 1024 * 1024
    closed = asyncio.Event()

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\n{closing}\r\nlong".encode())
        while await reader.read(65536):
            pass
        closed.set()

    server = await raw_server(refuses).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url, body)
        assert (reply.status, await whole(reply)) == (413, b"long")
        # What is left of the body would be read as another request.
        async with asyncio.timeout(5):
            await closed.wait()
        assert transport._pool is not None
        await eventually(lambda: not transport._pool._open)  # type: ignore[union-attr]


async def test_an_answer_is_read_though_the_backend_closed_on_what_it_did_not_read(raw_server: MakeServer) -> None:
    """Its close is a reset then."""

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\n\r\nlong")

    server = await raw_server(refuses).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url, b"x" * 32 * 1024 * 1024)
        assert (reply.status, await whole(reply)) == (413, b"long")


async def test_an_answer_that_has_come_is_read_before_more_is_written() -> None:
    """Writing on a connection that was reset fails, and with it goes what was not read."""
    with Peer(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\n\r\nlong") as peer:
        async with Transport() as transport:
            asking = asyncio.ensure_future(asked(transport, peer.url, b"x" * 8 * 1024 * 1024))
            while transport._pool is None or not any(one._unsent for one in transport._pool._open):  # noqa: ASYNC110
                await asyncio.sleep(0)
            peer.act()
            reply = await asking
            assert (reply.status, await whole(reply)) == (413, b"long")


async def test_an_answer_may_begin_while_the_body_is_sent(raw_server: MakeServer) -> None:
    body = b"x" * 8 * 1024 * 1024

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.readexactly(len(body))
        writer.write(b"4\r\nread\r\n0\r\n\r\n")
        await writer.drain()

    server = await raw_server(early).start()
    async with Transport() as transport:
        assert await whole(await asked(transport, server.url, body)) == b"okread"


async def test_a_cancelled_request_sends_no_more(raw_server: MakeServer) -> None:
    came = 0

    async def counts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        while piece := await reader.read(65536):
            came += len(piece)
            await asyncio.sleep(0.001)

    server = await raw_server(counts).start()
    async with Transport() as transport:
        asking = asyncio.ensure_future(asked(transport, server.url, b"x" * 32 * 1024 * 1024))
        await eventually(lambda: came > 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(5):
            while not server.ended:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
    assert came < 32 * 1024 * 1024
