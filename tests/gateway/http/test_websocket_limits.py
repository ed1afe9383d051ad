"""Limits, keys and origins of WebSockets: on a gateway that allows one page, short messages and one request at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode
from websockets.typing import Origin

from tests.gateway.backends.relay_support import eventually
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.http.websocket_client import (
    PATH,
    Paused,
    address,
    answer,
    ask,
    closing,
    code_of,
    opened,
    paris,
    refusal,
)
from tests.gateway.tenants.support import ACTOR, concurrent

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "cors_origins": ("https://app.example.com",),
    "max_body_bytes": 1000,
    "principal_cache_s": 0.1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    async with shared_gateway(
        databases, redis_server, tmp_path_factory.mktemp("gateway"), limits=[concurrent(1)], **SETTINGS
    ) as made:
        yield made


@pytest.fixture
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


@pytest.fixture
def upstream(shared: Shared) -> Any:
    return shared.script


async def test_limits_hold_for_each_request(gateway: Any, upstream: Any) -> None:
    await upstream(Paused())
    async with opened(gateway) as first, opened(gateway) as second:
        await ask(first)
        await first.recv()
        await ask(second)
        assert code_of((await answer(second))[-1]) == "rate_limit_exceeded"
        await first.close()
        async with asyncio.timeout(5):
            while True:
                await ask(second)
                if "error" not in json.loads(await second.recv()):
                    break
                await asyncio.sleep(0.02)
    assert [row.status for row in await gateway.rows(2)] == ["aborted", "aborted"]


async def test_each_request_is_authenticated_anew(gateway: Any, upstream: Any) -> None:
    await upstream(paris)
    key, record = await gateway.directory.create_key(ACTOR, "acme", "short-lived")
    async with opened(gateway, key=key) as connection:
        await ask(connection)
        assert (await answer(connection))[-1] == "[DONE]"
        await gateway.directory.revoke_key(ACTOR, record.public_id)
        async with asyncio.timeout(10):
            while True:
                await ask(connection)
                if (last := (await answer(connection))[-1]) != "[DONE]":
                    break
        assert code_of(last) == "invalid_api_key"


async def test_pages_of_other_origins_connect_only_if_they_are_allowed(gateway: Any) -> None:
    headers = {"authorization": f"Bearer {gateway.key}"}
    own = f"http://127.0.0.1:{gateway.port}"
    for origin in ("https://app.example.com", own):
        async with connect(address(gateway), additional_headers=headers, origin=Origin(origin)):
            pass
    for origin in ("https://evil.example.com", "null", "https://app.example.com.evil.com", "http://[", ""):
        status, error = await refusal(gateway, additional_headers=headers, origin=Origin(origin))
        assert (status, error["code"]) == (403, "origin_not_allowed")


async def test_a_message_over_the_limit_or_not_in_utf8_closes_the_connection(gateway: Any) -> None:
    async with opened(gateway) as connection:
        await connection.send("x" * 1001)
        assert (await closing(connection))[0] == 1009
    async with opened(gateway) as connection:
        connection.transport.write(Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True))
        assert (await closing(connection))[0] == 1007


async def test_pings_and_fragments_without_end_are_not_kept(gateway: Any) -> None:
    """From a client that reads nothing of the pongs; and of messages that never end, however little is in them."""
    loop = asyncio.get_running_loop()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", gateway.port))
        head = f"GET {PATH} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        await loop.sock_sendall(raw, f"{head}Authorization: Bearer {gateway.key}\r\n\r\n".encode())
        assert b"101 Switching" in await loop.sock_recv(raw, 1000)
        (connection,) = (each for each in gateway.server.server_state.connections if hasattr(each, "frames"))
        ping = Frame(Opcode.PING, b"x" * 125).serialize(mask=True)
        most = 0
        for _ in range(40):
            await loop.sock_sendall(raw, ping * 1000)
            await asyncio.sleep(0)
            most = max(most, connection.transport.get_write_buffer_size())
        await eventually(lambda: not connection.writable.is_set())
        assert most < 1_000_000
        first = Frame(Opcode.TEXT, b"{", fin=False).serialize(mask=True)
        await loop.sock_sendall(raw, first + Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 5000)
        await eventually(lambda: bool(connection.frames))
        await asyncio.sleep(0.05)
        assert len(connection.frames) == 1
        # The pong to the last ping comes, once there is room for it.
        last = Frame(Opcode.PING, b"last").serialize(mask=True)
        await loop.sock_sendall(raw, last)
        found = b""
        while b"last" not in found[-1000:]:
            found = found[-1000:] + await loop.sock_recv(raw, 1_000_000)
