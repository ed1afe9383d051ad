"""The relay before servers that are no stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from gateway.routing.route import Target
from tests.gateway.backends.relay_support import Rig, read, read_until_fault, rigged
from tests.real_servers.servers import SERVERS, RealServer

pytestmark = [pytest.mark.real_servers, pytest.mark.timeout(600)]
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module", params=list(SERVERS))
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealServer, str]]:
    server = SERVERS[request.param]
    if not server.installed:
        pytest.skip(f"`make real-servers SERVERS={server.name}` installs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp(server.name) / "log"
    process = server.start(port, log)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + server.starts_within_s
        while not _answers(url + server.ready_path):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield server, url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
async def rig(running: tuple[RealServer, str]) -> AsyncIterator[Rig]:
    server, url = running
    async with rigged(first_byte_s=300.0, idle_s=60.0) as made:
        made.use(url, family="openai", brand=server.brand)
        yield made


def ask(rig: Rig, server: RealServer, fields: dict[str, Any], **changes: Any) -> Any:
    streamed = changes.get("streamed", True)
    body = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in (fields | {"stream": streamed}).items()}
    values = {"body": body, "chat": body, "clamp_output": True, "output_cap": 8, "output_tokens": 8}
    return rig.open(targets=(Target("pool", server.model()),), total_s=400.0, **(values | changes))


async def test_whole_chats(rig: Rig, running: tuple[RealServer, str]) -> None:
    server, _ = running
    exchange = ask(rig, server, {"messages": MESSAGES, "temperature": 0}, streamed=False)
    (answer,) = [json.loads(data) for data in await read(exchange)]
    assert answer["model"] == "m"
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert exchange.usage.source == "backend"
    assert 10 < exchange.usage.prompt_tokens < 100
    assert 1 <= exchange.usage.completion_tokens <= 8


@pytest.mark.parametrize("wanted", [False, True])
async def test_streamed_chats(rig: Rig, running: tuple[RealServer, str], wanted: bool) -> None:
    server, _ = running
    exchange = ask(rig, server, {"messages": MESSAGES, "temperature": 0}, include_usage=wanted)
    events = [json.loads(data) for data in await read(exchange)]
    choices = [choice for each in events for choice in each["choices"]]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    assert {each["model"] for each in events} == {"m"}
    assert len([each for each in events if not each["choices"]]) <= (1 if wanted else 0)
    assert exchange.usage.source == ("backend" if server.tells_usage_in_streams else "estimated")
    assert 1 <= exchange.usage.completion_tokens <= 8


async def test_completions(rig: Rig, running: tuple[RealServer, str]) -> None:
    server, _ = running
    if not server.serves_completions:
        pytest.skip("it serves none")
    exchange = ask(rig, server, {"prompt": "The capital of France is", "temperature": 0}, api="completions", chat=None)
    events = [json.loads(data) for data in await read(exchange)]
    assert "Paris" in "".join(choice["text"] for each in events for choice in each["choices"])


async def test_what_it_refuses_has_a_status_and_words(rig: Rig, running: tuple[RealServer, str]) -> None:
    server, _ = running
    exchange = ask(rig, server, {"messages": "not a list", "temperature": "warm"})
    _, fault = await read_until_fault(exchange)
    error = fault.error()
    assert 400 <= error.status < 600
    assert error.status not in (401, 403, 404)
    assert json.loads(error.encode())["error"]["message"]


async def test_it_is_left_at_once_in_mid_stream(rig: Rig, running: tuple[RealServer, str]) -> None:
    server, _ = running
    fields = {"messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0}
    async with ask(rig, server, fields, output_cap=400, output_tokens=400) as exchange:
        await exchange.events()
    assert exchange.usage.completion_tokens < 50
    async with asyncio.timeout(120):
        await read(ask(rig, server, {"messages": MESSAGES}))
