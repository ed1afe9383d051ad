"""Connections as bytes, on both event loops that serve them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop

from worker.protocol.http_server import HttpProtocol

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
LIMIT_S = 5.0


class Served:
    """An app that tells what it was asked; ``/wait`` answers only once its client hung up, ``/stream`` in pieces."""

    def __init__(self) -> None:
        self.address = ("", 0)
        self.seen: queue.Queue[tuple[str, str, bytes]] = queue.Queue()
        self.hung_up = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        if scope["path"] in ("/refuse", "/refuse-late"):
            await asyncio.sleep(0.1 if scope["path"] == "/refuse-late" else 0)
            headers = [(b"content-length", b"2"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": b"no"})
            return
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.put((scope["method"], scope["path"], body))
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.hung_up.set()
        elif scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"32000000")]})
            await send({"type": "http.response.body", "body": b"x" * 32_000_000})
        elif scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"one ", b"two ", b"three"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            answer = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
            headers = [(b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, *packets: bytes) -> bytes:
        """What comes back until the server closes, which it is asked to in a last request of its own."""
        with self.connect() as connection:
            for packet in packets:
                connection.sendall(packet)
                time.sleep(0.02)
            connection.sendall(b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return read_all(connection)

    def requests(self) -> list[tuple[str, str, bytes]]:
        return [self.seen.get_nowait() for _ in range(self.seen.qsize())]


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    app = Served()
    listener = socket.create_server(("127.0.0.1", 0))
    app.address = listener.getsockname()
    config = uvicorn.Config(
        app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    running = uvicorn.Server(config)
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def serve() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(running.serve(sockets=[listener]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield app
    running.should_exit = True
    thread.join(10)


@pytest.fixture
def served(server: Served) -> Served:
    server.requests()
    server.hung_up.clear()
    return server


def post(path: str, body: bytes, more: bytes = b"", version: str = "1.1") -> tuple[bytes, bytes]:
    line = f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n".encode()
    return line + more + b"\r\n", body


LAST = ("GET", "/last", b"")


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("body", [b'{"model": "m"}', SMUGGLED, b""], ids=["json", "request", "empty"])
@pytest.mark.parametrize("cut", ["together", "apart", "within the head", "within the body", "byte by byte"])
def test_an_upgrade_offer_is_ignored_and_the_body_kept(served: Served, offer: bytes, body: bytes, cut: str) -> None:
    head, body = post("/upgrade", body, offer)
    packets = {
        "together": [head + body],
        "apart": [head, body],
        "within the head": [head[:-30], head[-30:] + body],
        "within the body": [head + body[:5], body[5:]],
        "byte by byte": [head[:-2], head[-2:-1], head[-1:], body[:1], body[1:2], body[2:]],
    }[cut]
    answered = served.ask(*packets)
    assert served.requests() == [("POST", "/upgrade", body), LAST]
    assert answered.count(b"HTTP/1.1 200 OK") == 2
    assert b"101 Switching" not in answered


def test_offers_in_a_row_and_among_other_requests_keep_their_order(served: Served) -> None:
    plain, offered = b"".join(post("/plain", b"p")), b"".join(post("/offer", SMUGGLED, H2C))
    served.ask(offered + offered + plain + offered + plain)
    paths = [("POST", "/offer", SMUGGLED)] * 2 + [("POST", "/plain", b"p"), ("POST", "/offer", SMUGGLED)]
    assert served.requests() == [*paths, ("POST", "/plain", b"p"), LAST]


def test_an_offer_with_a_chunked_body(served: Served) -> None:
    head = b"POST /chunks HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + H2C + b"\r\n"
    served.ask(head + b"%x\r\n" % len(SMUGGLED) + SMUGGLED, b"\r\n2\r\nhi\r\n0\r\n\r\n")
    assert served.requests() == [("POST", "/chunks", SMUGGLED + b"hi"), LAST]


def test_an_offer_before_the_answer_to_a_request_that_runs_changes_nothing_of_it(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"".join(post("/first", b"x")) + b"POST /second HTTP/1.1\r\nHost: a\r\n" + H2C)
        time.sleep(0.05)
        connection.sendall(b"Connection: close\r\nContent-Length: 3\r\n\r\nabc")
        answered = read_all(connection)
    assert served.requests() == [("POST", "/first", b"x"), ("POST", "/second", b"abc")]
    assert answered.count(b"HTTP/1.1 200 OK") == 2


def test_connect_is_refused_and_closes(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + SMUGGLED)
        answered = read_all(connection)
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert answered.count(b"HTTP/1.1") == 1
    assert served.requests() == []


@pytest.mark.parametrize("behind", ["together", "apart", "unread"])
def test_a_hang_up_reaches_the_request_that_runs_though_another_waits(served: Served, behind: str) -> None:
    with served.connect() as connection:
        first, second = b"".join(post("/wait", b"1")), b"".join(post("/second", b"2"))
        if behind == "together":
            connection.sendall(first + second)
        else:
            connection.sendall(first)
            assert served.seen.get(timeout=LIMIT_S) == ("POST", "/wait", b"1")
            time.sleep(0.05)
            connection.sendall(second)
            if behind != "apart":
                time.sleep(0.05)
                connection.sendall(b"".join(post("/third", b"3" * 50_000)))
        time.sleep(0.1)
        assert not served.hung_up.is_set()
    assert served.hung_up.wait(LIMIT_S)
    assert "/second" not in [path for _, path, _ in served.requests()]


def test_a_request_that_waits_is_served_after_a_long_one(served: Served) -> None:
    """Looking for hang-ups takes a client that only waits for none."""
    with served.connect() as connection:
        connection.sendall(b"".join(post("/stream", b"")) + b"".join(post("/second", b"2", b"Connection: close\r\n")))
        answered = read_all(connection)
    assert answered.count(b"HTTP/1.1 200 OK") == 2


def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"".join(post("/stream", b"", version="1.0")))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()


def test_an_answer_of_known_length_to_an_http_1_0_client_tells_it(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"".join(post("/whole", b"b", version="1.0")))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert json.loads(body) == ["POST", "/whole", "b"]
    assert f"content-length: {len(body)}".encode() in head.lower()


GET = b"GET /a HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /", b"x" * 10_000),
        (GET + b"X: ", b"y" * 10_000),
        (GET, b"X: y\r\n" * 2000),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: ", b"y" * 10_000),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n", b"X: y\r\n" * 2000),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;", b"y" * 10_000),
    ],
    ids=["target", "header", "headers", "trailer", "trailers", "chunk's extension"],
)
def test_a_head_that_does_not_end_is_refused(served: Served, begun: bytes, more: bytes) -> None:
    with served.connect() as connection:
        connection.sendall(begun)
        sent, answered = 0, b""
        try:
            while sent < 4_000_000:
                connection.sendall(more)
                sent += len(more)
                time.sleep(0.001)
        except ConnectionError:
            pass
        with contextlib.suppress(ConnectionError):
            answered = read_all(connection)
    assert sent < 4_000_000
    assert answered.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")) or not answered
    assert served.requests() == []


def test_a_long_body_in_small_pieces_is_no_head(served: Served) -> None:
    body = b"b" * 300_000
    chunks = b"".join(b"3e8\r\n" + body[:1000] + b"\r\n" for _ in range(300)) + b"0\r\n\r\n"
    served.ask(b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", chunks)
    assert served.requests() == [("POST", "/a", body), LAST]


@pytest.mark.parametrize(("used", "sent"), [(False, b""), (False, GET), (True, b"G")])
def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, used: bool, sent: bytes
) -> None:
    monkeypatch.setattr("worker.protocol.http_server.HEAD_WITHIN_S", 0.1)
    with served.connect() as connection:
        if used:
            connection.sendall(b"".join(post("/a", b"")))
            answered = b""
            while not answered.endswith(b"]"):
                answered += connection.recv(65536)
        connection.sendall(sent)
        answered = read_all(connection)
    assert answered.startswith(b"HTTP/1.1 408 ") if sent else not answered


def test_a_request_that_runs_is_not_hurried_by_the_limit_for_heads(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.protocol.http_server.HEAD_WITHIN_S", 0.05)
    with served.connect() as connection:
        connection.sendall(b"".join(post("/wait", b"1")))
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert served.hung_up.wait(LIMIT_S)


def test_an_answer_that_nobody_reads_is_not_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.protocol.http_server.FLUSH_CHECK_S", 0.1)
    with served.connect() as stuck, served.connect() as slow:
        for connection in (stuck, slow):
            connection.sendall(b"".join(post("/large", b"")))
        found = 0
        while found < 32_000_000 and (piece := slow.recv(500_000)):
            found += len(piece)
            time.sleep(0.005)
        assert found >= 32_000_000
        time.sleep(0.1)
        with contextlib.suppress(ConnectionResetError):
            assert len(read_all(stuck)) < 32_000_000


@pytest.mark.parametrize("sent", [8_000_000, 8_000_001])
def test_a_body_that_is_refused_may_be_sent_to_its_end(served: Served, sent: int) -> None:
    head, _ = post("/refuse", b"x" * 8_000_000)
    with served.connect() as connection:
        connection.sendall(head)
        assert connection.recv(1000, socket.MSG_PEEK).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"x" * sent)
        answered = read_all(connection)
    assert answered.startswith(b"HTTP/1.1 413 ")
    assert answered.endswith(b"\r\n\r\nno")


def test_a_refused_body_without_end_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.protocol.http_server.LINGER_S", 0.1)
    with served.connect() as connection:
        connection.sendall(post("/refuse", b"x" * 8_000_000)[0])
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):  # noqa: PT012 - it takes a while
            while True:
                connection.sendall(b"x" * 1000)
                time.sleep(0.02)


def test_what_is_sent_ahead_is_not_read_ahead(served: Served) -> None:
    """However much of it there is, and though each request that is answered asks for a body."""
    some, count = b"".join(post("/a", b"x" * 300)) * 50, 8000
    answered = b""
    with served.connect() as connection:
        sending = threading.Thread(target=lambda: [connection.sendall(some) for _ in range(count // 50)])
        sending.start()
        time.sleep(0.2)
        while answered.count(b"HTTP/1.1 200 OK") < count and (piece := connection.recv(65536)):
            answered += piece
        sending.join()
    assert answered.count(b"HTTP/1.1 200 OK") == count
    assert len(served.requests()) == count


def test_not_any_number_of_requests_may_wait(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"".join(post("/wait", b"1")))
        assert served.seen.get(timeout=LIMIT_S) == ("POST", "/wait", b"1")
        connection.sendall(b"GET /a HTTP/1.1\r\n\r\n" * 2000)
        with contextlib.suppress(ConnectionResetError):
            assert read_all(connection) == b""
    assert served.hung_up.wait(LIMIT_S)
    assert served.requests() == []


def test_the_last_answer_is_read_though_more_was_sent(served: Served) -> None:
    """A connection that is closed with something unread is reset, and what was on its way is lost."""
    with served.connect() as connection:
        connection.sendall(post("/refuse-late", b"")[0] + GET + b"\r\n")
        time.sleep(0.05)
        connection.sendall(b"".join(post("/unread", b"x" * 100_000)))
        time.sleep(0.2)
        answered = read_all(connection)
    assert answered.endswith(b"\r\n\r\nno")
    assert served.requests() == []


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Transfer-Encoding: identity", b""),
        (b"Transfer-Encoding: chunked", b"2\r\nok\r\nzz\r\n"),
        (b"Transfer-Encoding: chunked", b"2\nok"),
        (b"Expect: 100-continue\r\nTransfer-Encoding: chunked", b"zz\r\n"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(served: Served, head: bytes, body: bytes) -> None:
    for apart in (False, True):
        with served.connect() as connection:
            connection.sendall(b"POST /a HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n" + (b"" if apart else body))
            if apart:
                time.sleep(0.02)
                connection.sendall(body)
            answered = read_all(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert answered.count(b"HTTP/1.1") == 1
    assert served.requests() == []


def test_a_request_that_runs_is_not_answered_by_what_follows_it(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"".join(post("/wait", b"1")))
        assert served.seen.get(timeout=LIMIT_S) == ("POST", "/wait", b"1")
        connection.sendall(b"\0")
        assert read_all(connection) == b""
    assert served.hung_up.wait(LIMIT_S)
