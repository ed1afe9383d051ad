from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop

from worker.protocol.http_peer import PEER
from worker.protocol.http_server import HttpProtocol

KEEP_ALIVE_S = 1
HEADERS = [("content-type", "text/plain"), ("x-tab", "a\tb")]


class Served:
    """Answers with what it was sent: ``/asgi`` by ASGI's messages, all else past them where that can be."""

    def __init__(self) -> None:
        self.address = ("", 0)
        self.ways: queue.Queue[str] = queue.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        peer = scope["extensions"][PEER]
        body = None if scope["path"] == "/asgi" else peer.body()
        came, more = body is not None, body is None
        body = body or b""
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"] and scope["path"] != "/impatient"
        assert peer.hears(send) == (scope["http_version"] == "1.1")  # one stands around it for HTTP/1.0
        assert not peer.hears(lambda message: send(message))
        headers = list(HEADERS)
        if scope["path"] == "/close":
            headers.append(("connection", "close"))
        if scope["path"] == "/bad":
            with pytest.raises(ValueError, match="control character"):
                peer.answer(200, [("x-bad", body.decode())], b"")
            body = b"refused"
        sent = scope["path"] != "/asgi" and peer.answer(200, headers, body)
        self.ways.put(f"{'at once' if came else 'later'}, {'past' if sent else 'by'} ASGI")
        if not sent:
            head = [(b"content-length", b"%d" % len(body))]
            head += [(name.encode(), value.encode()) for name, value in headers]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})

    def ask(self, *packets: bytes) -> bytes:
        """What comes back until the server closes, but for the dates."""
        with socket.create_connection(self.address, timeout=5.0) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for packet in packets:
                connection.sendall(packet)
            came = b"".join(iter(lambda: connection.recv(65536), b""))
        return re.sub(rb"date: [^\r]*\r\n", b"", came)

    def took(self) -> list[str]:
        return [self.ways.get_nowait() for _ in range(self.ways.qsize())]


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    app = Served()
    listener = socket.create_server(("127.0.0.1", 0))
    app.address = listener.getsockname()
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_S,
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


def post(path: str, body: bytes, *more: str, version: str = "1.1", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: a", f"content-length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CLOSE = "connection: close"


@pytest.mark.parametrize("body", [b"hello", b"", b"x" * 1_000_000], ids=["short", "empty", "long"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_short_way_puts_the_same_on_the_wire(served: Served, body: bytes, version: str) -> None:
    served.took()
    past = served.ask(post("/past", body, CLOSE, version=version))
    assert served.took() == [f"{'at once' if len(body) < 1000 else 'later'}, past ASGI"]
    assert past == served.ask(post("/asgi", body, CLOSE, version=version))
    assert past.startswith(b"HTTP/1.1 200 OK\r\n")
    assert past.endswith(b"\r\n\r\n" + body)
    assert served.took() == ["later, by ASGI"]


def test_one_connection_serves_both_ways_in_turn(served: Served) -> None:
    served.took()
    requests = [post(path, b"%d" % number) for number, path in enumerate(["/past", "/asgi", "/past", "/past", "/asgi"])]
    came = served.ask(b"".join(requests) + post("/past", b"5", CLOSE))
    assert re.findall(rb"\r\n\r\n(\d)", came) == [b"%d" % number for number in range(6)]
    assert came.count(b"connection: close") == 1
    assert served.took() == [
        "at once, past ASGI",
        "later, by ASGI",
        "at once, past ASGI",
        "at once, past ASGI",
        "later, by ASGI",
        "at once, past ASGI",
    ]


def test_what_the_short_way_cannot_say_goes_by_asgi(served: Served) -> None:
    served.took()
    assert served.ask(post("/past", b"", CLOSE, method="HEAD")).endswith(b"\r\n\r\n")
    assert b"connection: close" in served.ask(post("/close", b"x"))
    assert served.took() == ["at once, by ASGI"] * 2


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b", b"a\x7f"])
def test_a_header_cannot_smuggle_another(served: Served, value: bytes) -> None:
    came = served.ask(post("/bad", value, CLOSE))
    assert b"cookie" not in came
    assert came.endswith(b"refused")


def test_a_body_that_waits_to_be_asked_for_is_asked_for(served: Served) -> None:
    served.took()
    with socket.create_connection(served.address, timeout=5.0) as connection:
        connection.sendall(post("/past", b"hello", "expect: 100-continue", CLOSE).removesuffix(b"hello"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert b"".join(iter(lambda: connection.recv(65536), b"")).endswith(b"hello")
    assert served.took() == ["later, past ASGI"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/past", "/asgi"])
def test_who_does_not_wait_for_an_invitation(served: Served, path: str, version: str) -> None:
    came = served.ask(post(path, b"hello", "expect: 100-continue", CLOSE, version=version))
    final = came.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert final.startswith(b"HTTP/1.1 200 OK\r\n")
    assert final.endswith(b"\r\n\r\nhello")
    assert (came == final) == (version == "1.0" or path == "/past")


def test_an_invitation_comes_before_the_answer(served: Served) -> None:
    """Though both are made in the same turn of the event loop."""
    came = served.ask(post("/impatient", b"hello, all", "expect: 100-continue", CLOSE).removesuffix(b" all"))
    assert re.findall(rb"HTTP/1.1 (\d+)", came) == [b"100", b"200"]
    assert came.endswith(b"hello,")


def test_a_connection_is_closed_when_it_idled_so_long_since_its_last_request(served: Served) -> None:
    with contextlib.closing(socket.create_connection(served.address, timeout=5.0)) as connection:
        for wait_s in (0.4 * KEEP_ALIVE_S, 0.0):
            connection.sendall(post("/past", b"again"))
            assert connection.recv(65536).endswith(b"again")
            time.sleep(wait_s)
        answered = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - answered > 0.9 * KEEP_ALIVE_S
