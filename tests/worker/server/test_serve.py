"""A worker's life: it joins, serves, drains and ends; and what happens when its engine dies. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.worker.server.conftest import FLEET_TOKEN, MODEL, PACKAGE, StartWorker, WorkerProcess
from tests.worker.server.test_registration import Gateway, gateway
from worker.protocol.sse import Event, Framer
from worker.server.serve import ServeError, accept, listen

__all__ = ["gateway"]

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def ended(worker: WorkerProcess, limit_s: float) -> int:
    async with asyncio.timeout(limit_s):
        return await asyncio.to_thread(worker.process.wait)


async def post(worker: WorkerProcess, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{worker.url}/v1/chat/completions", json=BODY | more)


async def until_running(worker: WorkerProcess, count: int) -> None:
    async with asyncio.timeout(20):
        while (await asyncio.to_thread(worker.health))["running"] < count:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


def events(body: bytes) -> list[bytes]:
    return [frame.data for frame in Framer().feed(body) if isinstance(frame, Event)]


async def test_sigterm_leaves_the_fleet_first_and_lets_answers_end(own_worker: StartWorker, gateway: Gateway) -> None:
    starting = asyncio.to_thread(own_worker, "--gateway-url", gateway.url, "--pool", "p", "--worker-id", "w-7")
    worker = await starting
    record = await gateway.next()
    assert (record.worker_id, record.pool, record.base_url, record.model) == ("w-7", "p", worker.url, MODEL)
    assert record.context_length == 1024
    assert gateway.tokens == {f"Bearer {FLEET_TOKEN}"}
    stream = asyncio.ensure_future(post(worker, stream=True))
    whole = asyncio.ensure_future(post(worker))
    await until_running(worker, 2)
    assert (await gateway.next()).running <= 2
    engine = worker.engine_pid
    worker.process.terminate()
    assert await ended(worker, 15) == 0
    draining = [record.draining for record in gateway.seen]
    assert draining == sorted(draining)
    assert draining[-1]
    assert gateway.withdrawn == ["w-7"]
    assert events((await stream).content)[-1] == b"[DONE]"
    assert (await whole).json()["choices"][0]["finish_reason"] == "stop"
    assert not psutil.pid_exists(engine)
    seen = len(gateway.seen)
    await asyncio.sleep(0.2)
    assert len(gateway.seen) == seen


async def test_answers_that_outlast_the_drain_are_told_so(own_worker: StartWorker) -> None:
    worker = await asyncio.to_thread(own_worker, "--drain-seconds", "0.3", text="word " * 400)
    stream = asyncio.ensure_future(post(worker, stream=True))
    whole = asyncio.ensure_future(post(worker))
    await until_running(worker, 2)
    worker.process.send_signal(signal.SIGINT)
    assert await ended(worker, 10) == 0
    cut = events((await stream).content)
    error = json.loads(cut[-1])["error"]
    assert (error["code"], error["message"]) == ("worker_stopping", "The worker is stopping. Send the request again.")
    assert b"[DONE]" not in cut
    refused = await whole
    assert (refused.status_code, refused.json()["error"]) == (503, error)
    assert refused.headers["retry-after"] == "1"


async def test_a_worker_whose_engine_dies_fails_its_answers_and_ends(own_worker: StartWorker, gateway: Gateway) -> None:
    worker = await asyncio.to_thread(own_worker, "--gateway-url", gateway.url, "--pool", "p", text="word " * 400)
    stream = asyncio.ensure_future(post(worker, stream=True))
    whole = asyncio.ensure_future(post(worker))
    await until_running(worker, 2)
    os.kill(worker.engine_pid, signal.SIGKILL)
    assert await ended(worker, 10) == 1
    cut = events((await stream).content)
    assert json.loads(cut[-1])["error"]["code"] == "engine_dead"
    assert b"[DONE]" not in cut
    failed = await whole
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_dead")
    assert gateway.withdrawn
    assert "killed by signal 9" in worker.events("engine dead")[0]["reason"]


async def test_an_idle_connection_does_not_hold_the_end_up(own_worker: StartWorker) -> None:
    worker = await asyncio.to_thread(own_worker)
    async with httpx.AsyncClient() as client:
        await client.get(f"{worker.url}/v1/models")
        began = time.monotonic()
        worker.process.terminate()
        assert await ended(worker, 10) == 0
        assert time.monotonic() - began < 5


async def test_an_idle_worker_sleeps_and_an_answer_wakes_it(own_worker: StartWorker, gateway: Gateway) -> None:
    options = ("--gateway-url", gateway.url, "--pool", "p", "--idle-sleep-seconds", "0.1", "--kv-events")
    worker = await asyncio.to_thread(own_worker, *options, step_s=0)
    while (record := await gateway.next()).sleep_level == 0:
        pass
    assert record.kv_events
    assert record.block_size == 16
    assert (await post(worker)).json()["choices"][0]["finish_reason"] == "stop"
    assert worker.events("engine asleep")


async def test_readers_of_events_do_not_hold_the_end_up(own_worker: StartWorker) -> None:
    worker = await asyncio.to_thread(own_worker, "--kv-events", step_s=0)
    headers = {"authorization": f"Bearer {FLEET_TOKEN}"}
    async with (
        httpx.AsyncClient(timeout=30, headers=headers) as client,
        client.stream("GET", f"{worker.url}/kv/events") as stream,
    ):
        assert stream.status_code == 200
        prompt = [{"role": "user", "content": "Tell me something long about rivers, their sources and their mouths."}]
        assert (await post(worker, messages=prompt)).status_code == 200
        began = time.monotonic()
        worker.process.terminate()
        body = b"".join([chunk async for chunk in stream.aiter_bytes()])  # to a proper end
        assert await ended(worker, 10) == 0
        assert time.monotonic() - began < 8
    assert b"event: stored" in body


def test_a_killed_worker_takes_its_engine_with_it(own_worker: StartWorker) -> None:
    worker = own_worker()
    engine = psutil.Process(worker.engine_pid)
    worker.process.kill()
    worker.process.wait()
    engine.wait(10)


def test_the_log_names_each_request_and_no_secret(own_worker: StartWorker) -> None:
    worker = own_worker(text="word", step_s=0)
    headers = {"authorization": f"Bearer {FLEET_TOKEN}", "x-request-id": "0193-abc"}
    answer = httpx.post(f"{worker.url}/v1/chat/completions", json=BODY, headers=headers, timeout=20)
    assert answer.status_code == 200
    deadline = time.monotonic() + 10
    while not worker.events("chat"):  # the line is written when the answer has left
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (line,) = worker.events("chat")
    assert (line["request_id"], line["outcome"], line["prompt_tokens"]) == ("0193-abc", "ok", 31)
    log = worker.log.read_text()
    assert FLEET_TOKEN not in log
    assert "word" not in log


def test_a_port_in_use_says_how_to_choose_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "worker.cli", "serve", "--model", PACKAGE, "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_of_two_workers_that_bind_one_port_together_the_slower_is_told() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        accept(first)
        with pytest.raises(ServeError, match="Choose another with --port"):
            accept(second)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_stop_while_it_starts_stops(number: signal.Signals, tmp_path_factory: Any) -> None:
    log = tmp_path_factory.mktemp("start") / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "worker.cli", "serve", "--model", PACKAGE, "--port", "0"]
        process = subprocess.Popen(command, stderr=out)
    deadline = time.monotonic() + 30
    while "loading" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(15) == 0
