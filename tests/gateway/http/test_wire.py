"""Both sides of the gateway at the level of sockets: which headers cross, and how fast bytes are taken."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from typing import Any

import httpx

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Capital of France?"}]}
ANSWER = b'{"choices":[{"message":{"content":"Paris"}}],"usage":{"prompt_tokens":9,"completion_tokens":3}}'

OWN_HEADERS = {"content-type", "accept", "accept-encoding", "authorization", "content-length", "host"}
"""What is sent to one of our workers, beside what begins with ``x-``."""
TOLD_HEADERS = {"content-type", "x-request-id", "x-penstock-backend", "date", "server"}
STREAM_HEADERS = TOLD_HEADERS | {"cache-control", "x-accel-buffering", "transfer-encoding"}
WHOLE_HEADERS = TOLD_HEADERS | {"content-length", "x-penstock-cost-usd"}

FORBIDDEN = {
    "cookie": "session=secret",
    "x-api-key": "secret",
    "x-forwarded-for": "10.0.0.1",
    "forwarded": "for=10.0.0.1",
    "proxy-authorization": "Basic secret",
    "te": "trailers",
    "expect": "100-continue",
    "x-penstock-tenant": "secret",
    "x-penstock-tenant-salt": "secret",
    "x-penstock-weight": "1000",
    "x-penstock-anything": "secret",
    "openai-organization": "secret",
    "accept-language": "fr",
    "user-agent": "secret",
    "referer": "http://secret",
}
LEAKS = (
    b"set-cookie: secret=1\r\nserver: secret/1.0\r\nx-powered-by: secret\r\nx-penstock-cost-usd: 0\r\n"
    b"location: /secret\r\n"
    b"x-penstock-backend: secret\r\nauthorization: secret\r\nx-request-id: secret\r\nx-ratelimit-limit-requests: 1\r\n"
    b"content-location: /secret\r\nwww-authenticate: secret\r\nkeep-alive: timeout=1\r\nvia: secret\r\netag: secret\r\n"
    b"alt-svc: secret\r\nstrict-transport-security: secret\r\naccess-control-allow-origin: *\r\nretry-after: 1\r\n"
)
PACKED = b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n"


async def exchanged(gateway: Any, ask: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
    """One request on a socket of its own: status line, headers and body as they came."""
    body = json.dumps(ask).encode()
    given = "".join(f"{name}: {value}\r\n" for name, value in FORBIDDEN.items())
    head = f"POST {PATH}?secret=1 HTTP/1.1\r\nhost: secret.example\r\nauthorization: Bearer {gateway.key}\r\n{given}"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close, x-secret\r\nx-secret: 1\r\n\r\n".encode())
    writer.write(body)
    async with asyncio.timeout(10):
        told = (await reader.read()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    writer.close()
    top, _, rest = told.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    names = [line.partition(":")[0] for line in lines]
    assert len(names) == len(set(names)), f"a header stands there twice: {names}"
    return first, {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}, rest


async def test_no_header_crosses_that_should_not(gateway: Any, upstream: Any) -> None:
    stream_head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"

    async def answer(c: Any) -> None:
        case = c.body["user"]
        if case == "error":
            body = gzip.compress(b'{"error":{"message":"too long","type":"invalid_request_error","code":"too_long"}}')
            head = (
                b"HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\nconnection: close\r\n"
            )
            await c.send(head + LEAKS + b"content-length: %d\r\n\r\n" % len(body) + body)
            return
        body = b"data: " + ANSWER + b"\n\ndata: [DONE]\n\n"
        if case == "compressed":
            body = gzip.compress(body)
            await c.send(
                stream_head + LEAKS + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
        else:
            await c.send(stream_head + LEAKS + b"transfer-encoding: chunked\r\n\r\n")
            await c.send_piece(body)
            await c.send(b"0\r\nx-trailer: secret\r\n\r\n")

    server = await upstream(answer)
    await gateway.register(server)
    for case in ("plain", "compressed", "error"):
        for stream in (True, False):
            first, headers, body = await exchanged(gateway, ASK | {"stream": stream, "user": case})
            shown = {name for name in headers if not name.startswith("x-ratelimit-")}
            assert "secret" not in str(headers), case
            assert b"secret" not in body
            assert headers["connection"] == "close"
            shown.discard("connection")
            if case == "error":
                assert first == "HTTP/1.1 400 Bad Request"
                assert shown <= WHOLE_HEADERS | {"retry-after"}
                assert json.loads(body)["error"]["code"] == "too_long"
            elif stream:
                assert shown <= STREAM_HEADERS
                assert ANSWER in body
            else:
                assert shown <= WHOLE_HEADERS
                assert int(headers["content-length"]) == len(body)
                assert body == ANSWER
    for seen in server.seen:
        assert seen.head == f"POST {PATH} HTTP/1.1"
        assert {name for name in seen.headers if not name.startswith("x-")} <= OWN_HEADERS | {"traceparent"}
        told = {name for name in seen.headers if name.startswith("x-")}
        assert told <= {"x-request-id", "x-penstock-tenant", "x-penstock-tenant-salt", "x-penstock-weight"} | {
            "x-penstock-meter",
            "x-penstock-clamp-output",
        }
        assert seen.headers["accept-encoding"] == "identity"
        assert "secret" not in str(seen.headers)
        assert gateway.key not in str(seen.headers)
    await gateway.rows(6)


async def test_a_client_that_reads_slowly_makes_its_backend_wait_and_nobody_else(gateway: Any, upstream: Any) -> None:
    sent = 0

    async def endless(c: Any) -> None:
        nonlocal sent
        if not c.body.get("stream"):
            await c.whole()
            return
        await c.begin()
        with contextlib.suppress(ConnectionError):
            for number in range(10**6):
                await c.token("x" * 1000, number + 1)
                sent += 1000

    await gateway.register(await upstream(endless))
    body = json.dumps(ASK | {"stream": True}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(slow, head.encode() + body)
        stands_at = -1
        async with asyncio.timeout(20):
            while sent == 0 or stands_at != sent:
                stands_at = sent
                assert await loop.sock_recv(slow, 1)
                await asyncio.sleep(0.2)
        assert sent < 50_000_000  # it is the kernel's buffers that hold it
        (connection,) = gateway.server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 256 * 1024
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {gateway.key}"}, timeout=20) as client:
            for _ in range(3):
                assert (await client.post(gateway.url + PATH, json=ASK)).status_code == 200
        assert stands_at == sent
    rows = await gateway.rows(4)
    assert sorted(row.status for row in rows) == ["aborted", "ok", "ok", "ok"]


async def test_signs_of_life_come_before_a_backend_says_anything(start_gateway: Any, upstream: Any) -> None:
    go_on = asyncio.Event()

    async def thinks(c: Any) -> None:
        await go_on.wait()
        await c.begin()
        await c.token("Paris", 1)
        await c.done()

    async with start_gateway(keepalive_s=0.1) as gateway:
        await gateway.register(await upstream(thinks))
        async with (
            httpx.AsyncClient(headers={"authorization": f"Bearer {gateway.key}"}, timeout=20) as client,
            client.stream("POST", gateway.url + PATH, json=ASK | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            pieces = answer.aiter_text()
            for _ in range(2):
                assert await anext(pieces) == ": keep-alive\n\n"
            go_on.set()
            rest = "".join([piece async for piece in pieces])
        assert "Paris" in rest
        assert rest.endswith("data: [DONE]\n\n")
