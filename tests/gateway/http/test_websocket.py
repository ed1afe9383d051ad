"""Chats over a WebSocket, by a real client over a real socket; only the backend is scripted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

from tests.gateway.conftest import chunk_event
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.http.websocket_client import ASK, PATH, Paused, address, answer, ask, code_of, opened, paris, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    async with shared_gateway(databases, redis_server, tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


@pytest.fixture
def upstream(shared: Shared) -> Any:
    return shared.script


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
    assert head["headers"]["x-request-id"] == str((await gateway.rows())[0].request_id)
    offered = [Subprotocol(name) for name in ("penstock", "penstock-heads", f"penstock-api-key.{gateway.key}")]
    async with connect(address(gateway), subprotocols=offered) as connection:
        await ask(connection)
        assert (await answer(connection))[0]["type"] == "response"
    await gateway.rows(2)


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
    await gateway.rows(2)


async def test_a_client_that_does_not_read_holds_the_backend_back(gateway: Any, upstream: Any) -> None:
    sent = 0

    async def endless(c: Any) -> None:
        nonlocal sent
        await c.begin()
        while True:
            await c.event(chunk_event("x" * 50_000))
            sent += 50_000

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
        plain = await client.get(gateway.url + PATH, headers={"origin": "https://page.example.com"})
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert plain.json()["error"]["code"] == "upgrade_required"
    # No page may read anything here.
    assert not [name for name in plain.headers if name.startswith("access-control") or name == "vary"]
