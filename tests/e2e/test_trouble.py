"""Things that break: who is told what, what the ledger says, and that all is well again without help."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from tests.e2e.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.e2e

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Write a very long story about the sea. Do not stop."}],
    "max_tokens": 2000,
    "temperature": 0.8,
    "seed": 3,
}


class RawRequest:
    """A request over a bare socket, so that the test says when the client leaves."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.id = str(uuid4())
        self.socket = socket.create_connection(("127.0.0.1", stack.port), timeout=60)
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: penstock\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer " + stack.key.encode() + b"\r\nx-request-id: " + self.id.encode() + b"\r\n"
            b"content-length: " + str(len(payload)).encode() + b"\r\n\r\n" + payload
        )

    def read_events(self, count: int) -> bytes:
        text = b""
        while text.count(b"data: {") < count:
            piece = self.socket.recv(65536)
            assert piece, text
            text += piece
        return text

    def leave(self) -> None:
        self.socket.close()


def events_of(answer: httpx.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield line[6:]


def read_to_cut(events: Iterator[str]) -> list[str]:
    """The events until the connection breaks."""
    seen: list[str] = []
    with pytest.raises(httpx.TransportError):
        seen.extend(events)
    return seen


def idle(stack: Stack) -> bool:
    return stack.worker_load() == (0, 0)


def stream(stack: Stack, port: int | None = None) -> Any:
    return httpx.stream(
        "POST",
        f"http://127.0.0.1:{port or stack.port}/v1/chat/completions",
        json=LONG | {"stream": True},
        headers={"authorization": f"Bearer {stack.key}"},
        timeout=60,
    )


def assert_error_event_and_no_done(events: list[str]) -> None:
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not any(
        choice.get("finish_reason") for event in events[:-1] for choice in json.loads(event).get("choices", [])
    )


def test_client_gone_in_mid_stream(stack: Stack) -> None:
    request = RawRequest(stack, LONG | {"stream": True})
    head = request.read_events(5)
    assert not idle(stack)
    request.leave()
    eventually(lambda: idle(stack), limit_s=2.0, what="the worker stops")
    request_id = head.split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()
    row = stack.row(request_id)
    assert row["status"] == "aborted"
    assert 0 < row["completion_tokens"] < 2000
    assert row["charged_nano_usd"] == 100 * row["prompt_tokens"] + 400 * row["completion_tokens"]
    assert stack.open_reservations() == []


def test_client_gone_in_a_whole_answer(stack: Stack) -> None:
    request = RawRequest(stack, LONG)
    eventually(lambda: stack.worker_load()[0] == 1, what="the worker runs it")
    time.sleep(1.0)
    request.leave()
    eventually(lambda: idle(stack), limit_s=2.0, what="the worker stops")
    (row,) = eventually(lambda: stack.rows("client_request_id = %s", request.id), what="row")
    assert row["status"] == "aborted"
    assert 0 < row["completion_tokens"] < 2000
    assert stack.open_reservations() == []


def test_worker_killed_in_mid_stream(stack: Stack) -> None:
    with stream(stack) as answer:
        events = events_of(answer)
        seen = [next(events) for _ in range(5)]
        os.kill(stack.worker_pid, signal.SIGKILL)
        seen += list(events)
    assert_error_event_and_no_done(seen)
    row = stack.row(answer.headers["x-request-id"])
    assert row["status"] == "failed"
    assert row["completion_tokens"] >= 4
    eventually(stack.recovered, limit_s=60, what="the worker is back")


def test_engine_process_killed_in_mid_stream(stack: Stack) -> None:
    worker = stack.worker_pid
    with stream(stack) as answer:
        events = events_of(answer)
        seen = [next(events) for _ in range(5)]
        os.kill(stack.engine_pid, signal.SIGKILL)
        seen += list(events)
    assert_error_event_and_no_done(seen)
    assert stack.row(answer.headers["x-request-id"])["status"] == "failed"
    eventually(lambda: worker not in stack.pids("penstock-worker"), what="the worker exits")
    eventually(stack.recovered, limit_s=60, what="the worker is back")


def test_no_worker_alive(stack: Stack, client: openai.OpenAI) -> None:
    with stack.frozen(stack.worker_pid):
        eventually(lambda: not stack.ready(), limit_s=20, what="the worker's record expires")
        started = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**(LONG | {"max_tokens": 4}))
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]
        assert time.monotonic() - started < 5
    eventually(stack.recovered, limit_s=60, what="the worker is back")


def test_gateway_killed_in_mid_stream_leaves_one_row_and_no_reservation(stack: Stack) -> None:
    with stream(stack) as answer:
        request_id = answer.headers["x-request-id"]
        events = events_of(answer)
        started = time.monotonic()
        count = 0
        # Longer than a heartbeat, so that some usage was checkpointed.
        while time.monotonic() - started < 5:
            next(events)
            count += 1
        assert stack.open_reservations() != []
        os.kill(stack.gateway_pid, signal.SIGKILL)
        rest = read_to_cut(events)
        assert "[DONE]" not in rest
    row = stack.row(request_id, limit_s=30)
    assert row["status"] == "abandoned"
    assert 0 < row["completion_tokens"] <= count + len(rest) + 50
    assert row["charged_nano_usd"] == 100 * row["prompt_tokens"] + 400 * row["completion_tokens"]
    assert stack.open_reservations() == []
    eventually(stack.recovered, limit_s=60, what="the gateway is back, and the worker stopped as well")
    assert len(stack.rows("request_id = %s", request_id)) == 1


@pytest.mark.parametrize("service", ["redis", "postgres"])
def test_a_store_hangs_for_ten_seconds(stack: Stack, client: openai.OpenAI, service: str) -> None:
    gateway = stack.gateway_pid
    pattern = {"redis": r"redis-server", "postgres": r"bin/postgres -D"}[service]
    pids = stack.pids(pattern)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    served: list[str] = []
    try:
        stopped_at = time.monotonic()
        while time.monotonic() - stopped_at < 10:
            asked_at = time.monotonic()
            try:
                raw = client.chat.completions.with_raw_response.create(**(LONG | {"max_tokens": 2}))
                served.append(raw.headers["x-request-id"])
            except openai.InternalServerError as fault:
                assert fault.status_code == 503
                assert fault.response.headers["retry-after"]
                assert "error" in fault.response.json()
            assert time.monotonic() - asked_at < 5
            time.sleep(0.5)
        assert httpx.get(f"{stack.url}/healthz", timeout=2).status_code == 200
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    eventually(stack.recovered, limit_s=30, what="an answer")
    assert stack.gateway_pid == gateway
    for request_id in served:
        assert stack.row(request_id)["status"] == "ok"
    eventually(lambda: stack.open_reservations() == [], what="no reservation is left")
    if service == "redis":
        assert served == []
