"""Long bodies are read beside the event loop, short ones are not: a thread would cost more than they do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from gateway.backends.fleet_worker import FleetWorker
from gateway.clock import SystemClock
from gateway.http.anthropic.ask import parse_messages
from gateway.http.anthropic.door import MessagesDoor
from gateway.http.client import Client
from gateway.http.openai.chat import ChatDoor
from gateway.http.openai.completions import CompletionsDoor
from gateway.http.openai.embeddings import EmbeddingsDoor
from gateway.http.openai.responses import ResponsesDoor
from gateway.long_work import LONG_BYTES, worked
from gateway.routing.route import Route
from gateway.tokens.counter import PromptCounter
from tests.gateway.backends.relay_support import read_until_fault, rigged
from worker.protocol.errors import ApiError, bad_request

LONG = "a" * LONG_BYTES
MESSAGE = {"role": "user", "content": "hi"}


async def test_work_on_many_bytes_has_a_thread_of_its_own() -> None:
    here = threading.get_ident()
    assert await worked(LONG_BYTES - 1, threading.get_ident) == here
    assert await worked(LONG_BYTES, threading.get_ident) != here

    def refuse() -> None:
        raise bad_request("No.")

    with pytest.raises(ApiError):
        await worked(LONG_BYTES, refuse)


def responses_door(request_id: Any, client: Client) -> ResponsesDoor:
    store: Any = SimpleNamespace(keeps=True, origins=lambda *_: None)
    return ResponsesDoor(request_id, client, store=store, clock=SystemClock(), most_bytes=2 * LONG_BYTES)


@pytest.mark.parametrize(
    ("door", "body"),
    [
        (ChatDoor, {"messages": [MESSAGE]}),
        (MessagesDoor, {"messages": [MESSAGE], "max_tokens": 1}),
        (CompletionsDoor, {"prompt": "hi"}),
        (EmbeddingsDoor, {"input": "hi"}),
        (responses_door, {"input": "hi"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_each_door_reads_long_bodies_so(door: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Client({"headers": []}, None, None)  # type: ignore[arg-type, typeddict-item]
    caller = threading.get_ident()
    threads: set[int] = set()
    decode = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def read(raw: bytes) -> Any:
        threads.add(threading.get_ident())
        return decode.decode(raw)

    monkeypatch.setattr("gateway.http.openai.fields._decoder", SimpleNamespace(decode=read))
    for extra, thread_of_its_own in (({}, False), ({"more": LONG}, True)):
        threads.clear()
        raw = msgspec.json.encode({"model": "m"} | body | extra)
        await door(uuid4(), client).ask(raw, SimpleNamespace(tenant_id=uuid4()))
        assert (threads != {caller}) is thread_of_its_own


@pytest.mark.parametrize(
    "content", [LONG, [{"type": "of its own"}, {"type": "text", "text": LONG}]], ids=["chat", "other"]
)
async def test_long_prompts_are_bounded_so(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def count(raw: bytes) -> int:
        threads.append(threading.get_ident())
        return 0

    monkeypatch.setattr("gateway.tokens.chat.count_images", count)
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    ask = parse_messages(msgspec.json.encode(body), counting=True)
    async with PromptCounter(lambda pool: [], no_fetch) as counter:
        route = Route("m", "pool", "m", 1000, 50, 500, 30.0)
        bound = await counter.bound(ask, route, 1000, tenant=b"t", exactly=True)
    assert bound.tokens == 1000
    assert threads
    assert threading.get_ident() not in threads


async def no_fetch(endpoint: Any) -> bytes:
    raise AssertionError(endpoint)


async def test_long_requests_are_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    write = FleetWorker.outgoing

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return write(*arguments)

    monkeypatch.setattr(FleetWorker, "outgoing", noted)
    async with rigged() as rig:
        for size in (100, LONG_BYTES):
            rig.use("http://127.0.0.1:9")
            await read_until_fault(rig.open(prompt_bytes=size))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
