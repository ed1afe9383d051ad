"""The routes of those who run a worker, over HTTP: who may use them, and that they do what they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worker.server.asking import BODY, FLEET, TEXT, error_of, until
from tests.worker.server.conftest import FLEET_TOKEN, MODEL, SCRIPTED
from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.protocol.kv_events import BlockStored, CacheCleared
from worker.protocol.sse import Comment, Event, Framer
from worker.server.app import create_app
from worker.server.chat_template import ChatTemplate
from worker.server.control import EventResponder
from worker.server.door import Door
from worker.server.http import HttpServer
from worker.server.kv_event_stream import KVEventStream
from worker.server.serve import listen, url_of
from worker.server.service import ModelService
from worker.server.tokenizer import Tokenizer

LONG = [{"role": "user", "content": "one two three four " * 8}]
"""More than a block of tokens."""


@dataclass
class Served:
    url: str
    engine: EngineClient
    events: KVEventStream | None

    def http(self, *, fleet: bool = True) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20, headers=FLEET if fleet else {})


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(tokenizer: Tokenizer, template: ChatTemplate) -> AsyncIterator[Serve]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            kv_events: bool = True,
            token: str | None = FLEET_TOKEN,
            token_required: bool = False,
            step_s: float = 0.0,
            **more: int,
        ) -> Served:
            script = {"ids": tokenizer.encode(TEXT), "step_s": step_s, "max_model_len": 512, **more}
            engine = await EngineClient.start(
                EngineConfig(model_path=json.dumps(script), kv_events=kv_events), command=SCRIPTED
            )
            stack.push_async_callback(engine.close)
            events = KVEventStream() if kv_events else None
            if events is not None:
                engine.on_kv_events = events.publish
            door = Door(token, token_required=token_required)
            server = HttpServer(create_app(ModelService(engine, template, MODEL), door, events=events))
            bound = listen("127.0.0.1", 0)
            serving = asyncio.ensure_future(server.serve(bound))
            stack.push_async_callback(lambda: serving)
            stack.callback(server.stop)
            if events is not None:
                stack.callback(events.close)
            await server.wait_started()
            return Served(url_of(bound), engine, events)

        yield start


async def chat(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=BODY | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Summed over labels."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def test_the_scrape_agrees_with_what_was_sent(serve: Serve) -> None:
    served = await serve()
    async with served.http() as client:
        usages = [(await chat(client))["usage"], (await chat(client, messages=LONG))["usage"]]
        streamed = await client.post(
            "/v1/chat/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}}
        )
        usages.append(json.loads(streamed.text.split("\n\n")[-3].removeprefix("data: "))["usage"])
        usages.append((await chat(client, messages=LONG, n=2))["usage"])
        assert (await client.post("/v1/chat/completions", json=BODY | {"temperature": 9})).status_code == 400
        told = await samples(client)
        assert told["penstock_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
        assert told["penstock_generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
        assert told["penstock_prompt_tokens_cached_total"] == sum(
            (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in usages
        )
        assert told["penstock_prefix_cache_hits_total"] > 0
        assert told["penstock_requests_total"] == 5
        assert told["penstock_time_to_first_token_seconds_count"] == 4
        assert told["penstock_e2e_request_latency_seconds_count"] == 4
        assert told["penstock_request_queue_time_seconds_count"] == 5  # of each choice
        assert told["penstock_inter_token_latency_seconds_count"] <= told["penstock_generation_tokens_total"] - 5
        assert told["penstock_engine_step_seconds_count"] == served.engine.stats.steps
        assert told["penstock_num_requests_running"] == 0


async def test_a_worker_without_a_token_is_open_to_its_own_machine(serve: Serve) -> None:
    served = await serve(token=None)
    async with served.http(fleet=False) as client:
        for path in ("/metrics", "/is_sleeping"):
            assert (await client.get(path)).status_code == 200
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
            assert (await client.post(path)).status_code == 200


@pytest.mark.parametrize("token_required", [False, True])
async def test_with_a_token_strangers_are_kept_from_all_but_metrics_on_loopback(
    serve: Serve, token_required: bool
) -> None:
    served = await serve(token_required=token_required)
    for wrong in ({}, {"authorization": "Bearer nearly-the-right-token"}, {"x-penstock-tenant": "a"}):
        async with httpx.AsyncClient(base_url=served.url, headers=wrong) as client:
            assert (await client.get("/metrics")).status_code == (401 if token_required else 200)
            for method, path in (
                ("POST", "/sleep"),
                ("POST", "/wake_up"),
                ("POST", "/reset_prefix_cache"),
                ("GET", "/is_sleeping"),
                ("GET", "/kv/events"),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == 401
                assert error_of(answer.content)["code"] == "invalid_api_key"
    assert served.engine.sleep_level == 0
    async with served.http() as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/is_sleeping")).status_code == 200


async def test_sleep_wake_and_wake_on_demand(serve: Serve) -> None:
    served = await serve()
    async with served.http() as client:
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False, "level": 0}
        for level in (1, 2):
            answer = await client.post(f"/sleep?level={level}")
            assert (answer.status_code, answer.json()) == (200, {"is_sleeping": True, "level": level})
            assert (await client.get("/is_sleeping")).json() == answer.json()
            assert (await samples(client))["penstock_engine_sleep_level"] == level
        assert (await client.post("/wake_up")).json() == {"is_sleeping": False, "level": 0}
        assert (await client.post("/wake_up")).status_code == 200
        await client.post("/sleep")
        assert (await chat(client))["choices"][0]["message"]["content"] == TEXT
        assert (await client.get("/is_sleeping")).json()["level"] == 0


async def test_a_worker_that_can_not_wake_says_so_and_tries_again(serve: Serve) -> None:
    served = await serve(failing_wakes=2)
    async with served.http() as client:
        await client.post("/sleep")
        for path, body in (("/wake_up", None), ("/v1/chat/completions", BODY)):
            answer = await client.post(path, json=body)
            assert answer.status_code == 503
            assert error_of(answer.content)["code"] == "engine_asleep"
            assert "could not be loaded again" in answer.text
            assert "secret" not in answer.text
            assert (await client.get("/is_sleeping")).json()["level"] == 1
        assert (await chat(client))["choices"][0]["message"]["content"] == TEXT
        assert (await client.get("/is_sleeping")).json()["level"] == 0


@pytest.mark.parametrize("level", ["0", "3", "deep", ""])
async def test_a_level_that_there_is_not_is_refused(serve: Serve, level: str) -> None:
    served = await serve()
    async with served.http() as client:
        answer = await client.post("/sleep", params={"level": level})
    assert answer.status_code == 400
    assert error_of(answer.content)["param"] == "level"
    assert served.engine.sleep_level == 0


async def test_no_sleep_while_requests_are_open(serve: Serve) -> None:
    served = await serve(step_s=0.05)
    async with served.http() as client:
        running = asyncio.ensure_future(chat(client))
        await until(lambda: served.engine.open_requests)
        answer = await client.post("/sleep")
        assert answer.status_code == 409
        assert error_of(answer.content)["code"] == "engine_busy"
        await running
        assert (await client.post("/sleep")).status_code == 200


async def test_a_reset_forgets_what_was_cached(serve: Serve) -> None:
    served = await serve()
    async with served.http() as client:
        hits = []
        for reset in (False, False, True):
            if reset:
                assert (await client.post("/reset_prefix_cache")).json() == {"reset": True}
            await chat(client, messages=LONG)
            hits.append((await samples(client))["penstock_prefix_cache_hits_total"])
    assert hits[0] == 0 < hits[1] == hits[2]


class Reader:
    """A reader of ``/kv/events``."""

    def __init__(self, response: httpx.Response) -> None:
        self._chunks = response.aiter_bytes()
        self._framer = Framer()
        self._events: list[Event] = []

    async def next(self) -> Event | None:
        """None at the end of the stream."""
        while not self._events:
            try:
                async with asyncio.timeout(10):
                    chunk = await anext(self._chunks)
            except StopAsyncIteration:
                return None
            self._events += [event for event in self._framer.feed(chunk) if isinstance(event, Event)]
        return self._events.pop(0)


@contextlib.asynccontextmanager
async def reading(served: Served, path: str = "/kv/events", **headers: str) -> AsyncIterator[Reader]:
    async with served.http() as client, client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        yield Reader(response)


async def test_what_the_engine_stores_is_told_live_and_replayed(serve: Serve) -> None:
    served = await serve()
    async with reading(served) as live, served.http() as client:
        usage = (await chat(client, messages=LONG))["usage"]
        stored = await live.next()
        assert stored is not None
        assert stored.event == b"stored"
        data = json.loads(stored.data)
        assert data["parent"] is None
        assert data["block_size"] == served.engine.info.block_size
        assert len(data["names"]) * data["block_size"] == len(data["token_ids"]) <= usage["prompt_tokens"]
        assert all(len(bytes.fromhex(name)) == 32 for name in data["names"])
        await client.post("/reset_prefix_cache")
        seen = [stored]
        while seen[-1].event != b"cleared":
            event = await live.next()
            assert event is not None
            seen.append(event)
    numbers = [int(event.id) for event in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(seen)))
    assert served.events is not None
    assert served.events.latest == numbers[-1]
    for path, headers, expected in (
        ("/kv/events", {}, seen),
        (f"/kv/events?from={numbers[1]}", {}, seen[1:]),
        ("/kv/events", {"last-event-id": str(numbers[0])}, seen[1:]),
        (f"/kv/events?from={numbers[0]}", {"last-event-id": str(numbers[0])}, seen[1:]),
    ):
        async with reading(served, path, **headers) as again:
            assert [await again.next() for _ in expected] == expected
    async with reading(served, "/kv/events?from=5") as strange:
        reset = await strange.next()
        assert reset is not None
        assert reset.event == b"reset"
        assert await strange.next() == seen[0]


async def test_a_salted_prompt_is_told_without_its_tokens(serve: Serve) -> None:
    served = await serve()
    async with reading(served) as live, served.http() as client:
        client.headers["x-penstock-tenant-salt"] = "s1"
        await chat(client, messages=LONG)
        stored = await live.next()
        assert stored is not None
        assert json.loads(stored.data)["token_ids"] is None


async def test_positions_that_are_none_are_refused_and_so_is_a_worker_that_tells_no_events(serve: Serve) -> None:
    served = await serve()
    async with served.http() as client:
        for path, headers, param in (
            ("/kv/events?from=-1", {}, "from"),
            ("/kv/events?from=x", {}, "from"),
            ("/kv/events", {"last-event-id": "1.5"}, "Last-Event-ID"),
        ):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 400
            assert error_of(answer.content)["param"] == param
    silent = await serve(kv_events=False)
    async with silent.http() as client:
        answer = await client.get("/kv/events")
        assert answer.status_code == 404
        assert "--kv-events" in error_of(answer.content)["message"]


async def test_the_end_of_the_worker_ends_the_stream(serve: Serve) -> None:
    served = await serve()
    assert served.events is not None
    async with reading(served) as live:
        served.events.close()
        assert await live.next() is None


async def test_a_reader_that_falls_behind_is_cut_and_learns_it_when_it_comes_back() -> None:
    stream = KVEventStream(buffer_bytes=2_000)
    sent: list[bytes] = []
    may_write = asyncio.Event()

    async def send(message: Any) -> None:
        await may_write.wait()
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    answering = asyncio.ensure_future(EventResponder(stream.follow())({}, never, send))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    stream.publish([CacheCleared()] * 5)
    may_write.set()
    await asyncio.sleep(0.01)
    may_write.clear()
    stream.publish([CacheCleared()])
    await asyncio.sleep(0)
    stream.publish([CacheCleared()] * 200)
    may_write.set()
    async with asyncio.timeout(5):
        await answering
    told = [frame for frame in Framer().feed(b"".join(sent)) if isinstance(frame, Event)]
    assert sent[-1] == b""
    assert 5 <= len(told) < 200
    assert int(told[-1].id) < stream.oldest - 1
    (reset, *_) = Framer().feed(await stream.follow(int(told[-1].id)).next())
    assert isinstance(reset, Event)
    assert reset.event == b"reset"


async def test_a_reader_that_stops_reading_is_cut() -> None:
    stream = KVEventStream()
    stuck = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body", b"").startswith(b"id"):
            await stuck.wait()

    answering = EventResponder(stream.follow(), stall_s=0.05)({}, never, send)  # type: ignore[arg-type]
    stream.publish([CacheCleared()])
    async with asyncio.timeout(5):
        await answering


async def test_a_silent_stream_is_kept_alive() -> None:
    stream = KVEventStream()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 5:
            stream.close()

    async with asyncio.timeout(5):
        await EventResponder(stream.follow(), keepalive_s=0.01)({}, never, send)  # type: ignore[arg-type]
    assert [type(frame) for frame in Framer().feed(b"".join(sent))] == [Comment] * 4


async def test_a_real_connection_that_nobody_reads_holds_a_bounded_amount(serve: Serve) -> None:
    served = await serve()
    assert served.events is not None
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /kv/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {FLEET_TOKEN}\r\n\r\n"
        connection.sendall(request.encode())
        await asyncio.sleep(0.1)
        big = BlockStored([bytes(32)], None, 16, [50_000] * 10_000)
        for _ in range(400):  # 24 MB, more than the stream keeps
            served.events.publish([big])
        async with reading(served) as other:
            first = await other.next()
            assert first is not None
            assert first.event == b"reset"
        assert served.events._kept_bytes <= 16 * 1024 * 1024
    async with served.http() as client:
        assert (await client.get("/health")).status_code == 200


async def never() -> Any:
    await asyncio.Event().wait()
