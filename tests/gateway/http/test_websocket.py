"""Chats over a WebSocket, by a real client over a real socket; only the backend is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.typing import Origin, Subprotocol

from tests.gateway.conftest import chunk_event
from tests.gateway.tenants.support import ACTOR, concurrent

PATH = "/v1/realtime-chat"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Capital of France?"}]}


def address(gateway: Any) -> str:
    return f"ws://127.0.0.1:{gateway.port}{PATH}"


@contextlib.asynccontextmanager
async def opened(gateway: Any, *, key: str | None = None, **headers: str) -> AsyncIterator[ClientConnection]:
    told = {"authorization": f"Bearer {key or gateway.key}"} | {n.replace("_", "-"): v for n, v in headers.items()}
    async with asyncio.timeout(20), connect(address(gateway), additional_headers=told) as connection:
        yield connection


async def ask(connection: ClientConnection, body: Any = ASK) -> None:
    await connection.send(body if isinstance(body, str) else json.dumps(body))


async def answer(connection: ClientConnection) -> list[Any]:
    """All frames up to ``[DONE]`` or an error."""
    frames: list[Any] = []
    while True:
        text = await connection.recv()
        frames.append(text if text == "[DONE]" else json.loads(text))
        if text == "[DONE]" or "error" in frames[-1]:
            return frames


def code_of(frame: Any) -> str:
    assert set(frame) == {"error"}
    assert set(frame["error"]) == {"message", "type", "param", "code"}
    return str(frame["error"]["code"])


async def closing(connection: ClientConnection) -> tuple[int, str]:
    try:
        while True:
            await connection.recv()
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return closed.rcvd.code, closed.rcvd.reason


async def paris(c: Any) -> None:
    await c.begin()
    await c.token("Par", 1)
    await c.token("is — 日本", 2)
    await c.done()


class Paused:
    """A backend that says a token and waits."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.closed_after_s: list[float] = []

    async def __call__(self, c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        closed = asyncio.ensure_future(c.wait_closed_by_peer(10))
        go = asyncio.ensure_future(self.go.wait())
        await asyncio.wait([closed, go], return_when=asyncio.FIRST_COMPLETED)
        go.cancel()
        if closed.done():
            self.closed_after_s.append(closed.result())
            return
        closed.cancel()
        await c.token("is", 2)
        await c.done()


async def test_one_answer_after_another_as_the_event_stream_has_them(gateway: Any, upstream: Any) -> None:
    server = await upstream(paris)
    await gateway.register(server)
    async with httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {gateway.key}"}
        stream = await http.post(f"{gateway.url}/v1/chat/completions", json=ASK | {"stream": True}, headers=headers)
    events = [part.removeprefix("data: ") for part in stream.text.split("\n\n") if part]
    async with opened(gateway, x_request_id="mine-7") as connection:
        for number in range(2):
            await ask(connection, ASK | {"top_k": number})
            assert [await connection.recv() for _ in events] == events
        await ask(connection, {"type": "ping"})
        assert json.loads(await connection.recv()) == {"type": "pong"}
    assert server.seen[1].body == ASK | {"stream": True, "top_k": 0, "max_tokens": 50}
    rows = await gateway.rows(3)
    assert {(row.status, row.streamed, row.completion_tokens, row.api) for row in rows} == {
        ("ok", True, 2, "chat_completions")
    }
    assert [row.client_request_id for row in rows] == [None, "mine-7", "mine-7"]
    assert len({row.request_id for row in rows}) == 3


async def test_what_an_http_answers_head_tells_is_told_if_wanted(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(paris))
    async with opened(gateway, x_penstock_heads="1") as connection:
        await ask(connection)
        head, *_ = await answer(connection)
        assert (head["type"], head["status"]) == ("response", 200)
        assert head["headers"]["x-penstock-backend"] == "w1"
        await ask(connection, ASK | {"model": "none"})
        refused, error = await answer(connection)
        assert (refused["status"], code_of(error)) == (404, "model_not_found")
    (row,) = await gateway.rows()
    assert head["headers"]["x-request-id"] == str(row.request_id)


async def test_whoever_leaves_ends_the_backends_work_within_a_second(gateway: Any, upstream: Any) -> None:
    paused = Paused()
    await gateway.register(await upstream(paused, paris, paused))
    for leave in ("cancel", "close", "drop"):
        await leaves(gateway, paused, leave)
    rows = await gateway.rows(4)
    assert [(row.status, row.completion_tokens) for row in rows] == [
        ("aborted", 1),
        ("ok", 2),
        ("aborted", 1),
        ("aborted", 1),
    ]


async def leaves(gateway: Any, paused: Paused, leave: str) -> None:
    paused.closed_after_s.clear()
    async with opened(gateway) as connection:
        await ask(connection)
        assert "Par" in str(await connection.recv())
        if leave == "cancel":
            await ask(connection, {"type": "cancel"})
            assert json.loads(await connection.recv()) == {"type": "cancelled"}
            await ask(connection)  # at once, and not in progress
            assert (await answer(connection))[-1] == "[DONE]"
        elif leave == "drop":
            connection.transport.abort()
        else:
            await connection.close()
        async with asyncio.timeout(5):
            while not paused.closed_after_s:  # noqa: ASYNC110 - the backend tells no event
                await asyncio.sleep(0.01)
    assert paused.closed_after_s[0] < 2.0


async def test_a_cancel_before_the_backend_answers_ends_it_too_and_an_idle_one_says_nothing(
    gateway: Any, upstream: Any
) -> None:
    async def silent(c: Any) -> None:
        await c.wait_closed_by_peer()

    await gateway.register(await upstream(silent))
    async with opened(gateway) as connection:
        await ask(connection, {"type": "cancel"})
        await ask(connection)
        await ask(connection, {"type": "cancel"})
        assert json.loads(await connection.recv()) == {"type": "cancelled"}
    (row,) = await gateway.rows()
    assert (row.status, row.charged_nano_usd) == ("aborted", 0)


async def test_a_second_request_is_refused_and_the_first_goes_on(gateway: Any, upstream: Any) -> None:
    paused = Paused()
    await gateway.register(await upstream(paused))
    async with opened(gateway) as connection:
        await ask(connection)
        await connection.recv()
        await ask(connection)
        assert code_of(json.loads(await connection.recv())) == "request_in_progress"
        await ask(connection, {"type": "ping"})
        assert json.loads(await connection.recv()) == {"type": "pong"}
        paused.go.set()
        assert (await answer(connection))[-1] == "[DONE]"
    (row,) = await gateway.rows()
    assert row.status == "ok"


BAD: list[tuple[str | bytes, str | None, str | None]] = [
    ("", None, None),
    ("{", None, None),
    ("[" * 20_000, None, None),
    ('{"a":' * 20_000, None, None),
    ("null", None, None),
    ('{"model":"m","messages":[{}],"temperature":NaN}', None, None),
    ('{"model":"m","messages":[{"content":"\\ud800"}]}', None, None),
    ('{"model":"m","messages":[]}', "messages", None),
    (json.dumps(ASK | {"stream": False}), "stream", None),
    (json.dumps(ASK | {"n": 0}), "n", None),
    (json.dumps(ASK | {"type": "other"}), "type", "unknown_message_type"),
    ('{"type": 5}', "type", "unknown_message_type"),
    (b"\x00\xff", None, "binary_message"),
]


async def bad_messages_are_told(connection: ClientConnection) -> None:
    for message, param, code in BAD:
        await connection.send(message)
        error = json.loads(await connection.recv())
        assert (error["error"]["type"], error["error"]["param"]) == ("invalid_request_error", param), message
        assert code is None or code_of(error) == code


async def test_errors_are_frames_and_the_connection_stays(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        c.reset()

    async def refuses(c: Any) -> None:
        await c.status(400, b'{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":null}}')

    await gateway.register(await upstream(cut, refuses, paris))
    async with opened(gateway) as connection:
        await ask(connection)
        frames = await answer(connection)
        assert (len(frames), code_of(frames[-1])) == (2, "backend_disconnected")
        await ask(connection)
        assert (await answer(connection))[-1]["error"]["message"] == "No."
        await bad_messages_are_told(connection)
        await ask(connection)
        assert (await answer(connection))[-1] == "[DONE]"
    assert [row.status for row in await gateway.rows(3)] == ["failed", "failed", "ok"]


async def test_limits_hold_for_each_request(start_gateway: Any, upstream: Any) -> None:
    paused = Paused()
    async with start_gateway(limits=[concurrent(1)]) as gateway:
        await gateway.register(await upstream(paused))
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


async def refusal(gateway: Any, **arguments: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(address(gateway), **arguments):
            pass
    response = caught.value.response
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = json.loads(response.body or b"")["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


async def bad_keys_are_refused_before_the_upgrade(gateway: Any) -> None:
    unknown = "sk-penstock-" + "a" * 12 + "-" + "b" * 43
    for arguments in (
        {},
        {"additional_headers": {"authorization": f"Bearer {unknown}"}},
        {"subprotocols": ["penstock", f"penstock-api-key.{unknown}"]},
        {"subprotocols": [f"penstock-api-key.{gateway.key}"]},  # none that could be selected
    ):
        status, error = await refusal(gateway, **arguments)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert unknown not in str(error)


async def test_a_key_may_come_as_a_sub_protocol(gateway: Any, upstream: Any, caplog: pytest.LogCaptureFixture) -> None:
    await gateway.register(await upstream(paris))
    for chosen, beginning in (("penstock", "penstock-api-key."), ("realtime", "openai-insecure-api-key.")):
        offered = [Subprotocol(chosen), Subprotocol(beginning + gateway.key)]
        async with connect(address(gateway), subprotocols=offered) as connection:
            assert connection.subprotocol == chosen
            assert gateway.key not in str(connection.response)
            await ask(connection)
            assert (await answer(connection))[-1] == "[DONE]"
    await bad_keys_are_refused_before_the_upgrade(gateway)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_each_request_is_authenticated_anew(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(principal_cache_s=0.1) as gateway:
        await gateway.register(await upstream(paris))
        await revoked(gateway)


async def revoked(gateway: Any) -> None:
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


async def test_pages_of_other_origins_connect_only_if_they_are_allowed(start_gateway: Any) -> None:
    async with start_gateway(cors_origins=("https://app.example.com",)) as gateway:
        headers = {"authorization": f"Bearer {gateway.key}"}
        own = f"http://127.0.0.1:{gateway.port}"
        for origin in ("https://app.example.com", own):
            async with connect(address(gateway), additional_headers=headers, origin=Origin(origin)):
                pass
        for origin in ("https://evil.example.com", "null", "https://app.example.com.evil.com", "http://[", ""):
            status, error = await refusal(gateway, additional_headers=headers, origin=Origin(origin))
            assert (status, error["code"]) == (403, "origin_not_allowed")


async def test_a_message_over_the_limit_or_not_in_utf8_closes_the_connection(start_gateway: Any) -> None:
    async with start_gateway(max_body_bytes=1000) as gateway:
        async with opened(gateway) as connection:
            await connection.send("x" * 1001)
            assert (await closing(connection))[0] == 1009
        async with opened(gateway) as connection:
            connection.transport.write(Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True))
            assert (await closing(connection))[0] == 1007


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not(
    start_gateway: Any, upstream: Any
) -> None:
    async def slow(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await asyncio.sleep(0.6)
        await c.done()

    async with start_gateway(websocket_idle_s=0.3) as gateway:
        await gateway.register(await upstream(slow))
        async with opened(gateway) as connection:
            await ask(connection)
            assert (await answer(connection))[-1] == "[DONE]"
            assert await closing(connection) == (1000, "nothing was asked for 0.3 s")
        await gateway.rows(1)


async def test_a_stop_closes_idle_connections_and_lets_a_stream_end(start_gateway: Any, upstream: Any) -> None:
    paused = Paused()
    async with start_gateway() as gateway:
        gateway.server.config.timeout_graceful_shutdown = 10
        await gateway.register(await upstream(paused))
        async with opened(gateway) as idle, opened(gateway) as busy:
            await ask(busy)
            await busy.recv()
            gateway.server.should_exit = True
            assert await closing(idle) == (1012, "the gateway restarts")
            await ask(busy, {"type": "ping"})
            assert json.loads(await busy.recv()) == {"type": "pong"}
            paused.go.set()
            assert (await answer(busy))[-1] == "[DONE]"
            assert await closing(busy) == (1012, "the gateway restarts")
        await gateway.server.stopped.wait()
        (row,) = await gateway.rows()
        assert row.status == "ok"


async def test_a_stream_that_outlasts_the_stop_is_cut_with_an_error(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway() as gateway:
        await gateway.register(await upstream(Paused()))
        async with opened(gateway) as connection:
            await ask(connection)
            await connection.recv()
            gateway.server.should_exit = True
            assert code_of((await answer(connection))[-1]) == "gateway_stopping"
            assert (await closing(connection))[0] == 1012
        await gateway.server.stopped.wait()
        (row,) = await gateway.rows()
        assert (row.status, row.error_code) == ("failed", "gateway_stopping")


async def test_a_client_that_does_not_read_holds_the_backend_back(start_gateway: Any, upstream: Any) -> None:
    sent = 0

    async def endless(c: Any) -> None:
        nonlocal sent
        await c.begin()
        while True:
            await c.event(chunk_event("x" * 50_000))
            sent += 50_000

    async with start_gateway() as gateway:
        await gateway.register(await upstream(endless))
        raw = socket.create_connection(("127.0.0.1", gateway.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        head = f"GET {PATH} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        await loop.sock_sendall(raw, f"{head}Authorization: Bearer {gateway.key}\r\n\r\n".encode())
        assert b"101 Switching" in await loop.sock_recv(raw, 1000)
        await loop.sock_sendall(raw, Frame(Opcode.TEXT, json.dumps(ASK).encode()).serialize(mask=True))
        before = -1
        async with asyncio.timeout(15):
            while not sent or sent != before:
                before = sent
                await asyncio.sleep(0.2)
        assert sent < 30_000_000
        raw.close()
        (row,) = await gateway.rows()
        assert row.status == "aborted"


HANDSHAKE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
HANDSHAKE += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
OFFERS = [
    (f"GET {PATH}", b"", 401),  # as a WebSocket
    (f"GET {PATH}?x=1", b"", 401),
    ("GET /healthz", b"", 200),  # everywhere else the offer is ignored
    ("GET /v1/models", b"", 401),
    (f"GET {PATH}", b"Content-Length: 5\r\n", 426),
    (f"POST {PATH}", b"Content-Length: 5\r\n", 426),
    (f"GET {PATH}", b"X: y\r\n" * 200, 400),
    (f"GET {PATH}", b"Sec-WebSocket-Version: 8\r\n", 400),
]


async def told(gateway: Any, sent: bytes) -> bytes:
    """All that is answered, if the connection is closed in the end; else what came first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(5):
            return await (reader.read() if sent.startswith(b"GET /v1/realtime-chat") else reader.read(1000))
    finally:
        writer.close()
        await writer.wait_closed()


async def test_only_a_handshake_on_its_path_upgrades(gateway: Any) -> None:
    for line, more, status in OFFERS:
        body = b"hello" if b"Length" in more else b""
        sent = f"{line} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode() + HANDSHAKE + more + b"\r\n" + body
        assert (await told(gateway, sent)).split()[1] == b"%d" % status, line
    sent = f"GET {PATH} HTTP/1.1\r\nHost: a\r\n".encode() + HANDSHAKE + b"\r\n"
    answered = await told(gateway, sent + b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert answered.count(b"HTTP/1.1") == 1
    # Nor does one behind a request that is not answered yet: its answer would be taken for frames.
    last = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    answered = await told(gateway, f"GET {PATH} HTTP/1.1\r\nHost: a\r\n\r\n".encode() + sent + last)
    assert (answered.count(b"HTTP/1.1 426 "), answered.count(b"HTTP/1.1 200 ")) == (2, 1)
    async with httpx.AsyncClient() as client:
        plain = await client.get(gateway.url + PATH)
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert plain.json()["error"]["code"] == "upgrade_required"
