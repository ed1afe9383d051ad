"""Answers on the wire: meters, hang-ups, silence, full queues and dead engines, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from openai import APIError, InternalServerError

from tests.worker.server.asking import BODY, FLEET, TEXT, collect, error_of, frames, http, sdk, until
from tests.worker.server.conftest import StartScripted
from worker.protocol.sse import Comment, Event
from worker.protocol.usage import MeterReading, decode_meter


def counted(readings: list[MeterReading | None]) -> list[tuple[int, int]]:
    """Prompt and completion tokens of each reading. Its time grows from one to the next."""
    assert all(readings)
    told = [reading for reading in readings if reading is not None]
    times = [reading.compute_us for reading in told]
    assert times == sorted(times)
    assert times[-1] > 0
    return [(reading.prompt_tokens, reading.completion_tokens) for reading in told]


async def test_the_engine_stops_at_a_stop_string(scripted: StartScripted) -> None:
    server = await scripted("one two three" + " and on" * 60, step_s=0.02)
    async with sdk(server) as client:
        await client.chat.completions.create(**BODY, stop="two")
    assert await until(lambda: server.engine.open_requests == 0) < 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_metered_answers(scripted: StartScripted, stream: bool) -> None:
    """As the protocol says: running totals before each event, a whole answer as the one event of a stream."""
    server = await scripted("one two three four", step_s=0.02)
    headers = FLEET | {"x-penstock-meter": "1", "x-request-id": "0193-7a"}
    async with http(server) as client:
        body = BODY | {"stream": stream}
        metered = await client.post("/v1/chat/completions", json=body, headers=headers)
        plain = await client.post("/v1/chat/completions", json=BODY)
        strangers = await client.post(
            "/v1/chat/completions", json=BODY, headers=headers | {"authorization": "Bearer x"}
        )
    assert metered.headers["content-type"] == "text/event-stream"
    assert metered.headers["x-request-id"] == "0193-7a"
    found = frames(metered.content)
    readings = [decode_meter(frame.text) for frame in found if isinstance(frame, Comment)]
    told = counted(readings)
    assert told == sorted(set(told))  # some may be one on a slow machine
    assert set(told) <= {(31, count) for count in range(1, 6)}
    assert told[-1] == (31, 5)
    events = [frame.data for frame in found if isinstance(frame, Event)]
    assert events[-1] == b"[DONE]"
    assert isinstance(found[0], Comment)
    if stream:
        assert 1 + 1 + 1 + 1 <= len(events) <= 1 + 4 + 1 + 1
    else:
        assert len(events) == 2
        whole = json.loads(events[0])
        assert whole["id"] == "chatcmpl-01937a"
        expected = plain.json()
        # The second time the prompt's first block is found.
        assert whole["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
        assert expected["usage"].pop("prompt_tokens_details") == {"cached_tokens": 16}
        assert {**whole, "id": 0, "created": 0} == {**expected, "id": 0, "created": 0}
    # Without the fleet token the gateway's headers mean nothing.
    assert strangers.headers["content-type"] == "application/json"
    assert strangers.headers["x-request-id"] != "0193-7a"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_metered_as_it_is_computed(scripted: StartScripted, stream: bool) -> None:
    """31 tokens in chunks of 10: whoever leaves in their midst owes those that were computed."""
    server = await scripted("one two", step_s=0.1, max_batched_tokens=10)
    headers = FLEET | {"x-penstock-meter": "1"}
    body = BODY | {"stream": stream}
    async with http(server) as client:
        whole = await client.post("/v1/chat/completions", json=body, headers=headers)
        found = frames(whole.content)
        readings = [decode_meter(frame.text) for frame in found if isinstance(frame, Comment)]
        before_event = next(at for at, frame in enumerate(found) if isinstance(frame, Event))
        expected = [(10, 0), (20, 0), (30, 0), (31, 1), (31, 2), (31, 3)]
        told = counted(readings)
        assert set(told) <= set(expected)  # some may be one on a slow machine
        assert told == sorted(told, key=expected.index)
        assert told[0] in expected[:3]
        assert told[-1] == expected[-1]
        assert stream is (before_event < len(readings))
        if stream:
            events = [json.loads(frame.data) for frame in found if isinstance(frame, Event) and frame.data != b"[DONE]"]
            roles = [event["choices"][0]["delta"].get("role") for event in events]
            assert roles == ["assistant", None, None, None]

        async with client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": stream}, headers=headers
        ) as cut:
            seen = frames(await anext(cut.aiter_raw()))
            assert isinstance(seen[0], Comment)
            assert counted([decode_meter(seen[0].text)])[0][0] in (16, 26, 31)  # a block was found this time
        assert await until(lambda: server.engine.open_requests == 0) < 1.0


async def test_a_stream_without_meter_begins_with_its_first_token(scripted: StartScripted) -> None:
    server = await scripted("one", step_s=0.1, max_batched_tokens=10)
    async with http(server) as client:
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"stream": True}))
        await until(lambda: server.engine.stats.steps >= 1)
        os.kill(server.engine_pid, signal.SIGKILL)
        failed = await asking
    assert (failed.status_code, error_of(failed.content)["code"]) == (500, "engine_dead")


async def test_a_metered_answer_that_fails_before_its_first_token(scripted: StartScripted) -> None:
    server = await scripted("one", step_s=0.1, max_batched_tokens=10)
    headers = FLEET | {"x-penstock-meter": "1"}
    async with http(server) as client, client.stream("POST", "/v1/chat/completions", json=BODY, headers=headers) as cut:
        received = bytearray()
        async for piece in cut.aiter_raw():
            if not received:
                os.kill(server.engine_pid, signal.SIGKILL)
            received += piece
    (event,) = [frame for frame in frames(bytes(received)) if isinstance(frame, Event)]
    assert error_of(event.data)["code"] == "engine_dead"


async def test_a_clamped_output_is_shortened_to_what_fits(scripted: StartScripted) -> None:
    server = await scripted("word" * 50, max_model_len=40)
    async with http(server) as client:
        body = BODY | {"max_tokens": 5000}
        clamp = {"x-penstock-clamp-output": "1"}
        clamped = await client.post("/v1/chat/completions", json=body, headers=FLEET | clamp)
        refused = await client.post("/v1/chat/completions", json=body, headers=clamp)
    assert clamped.json()["usage"]["completion_tokens"] == 40 - 31
    assert clamped.json()["choices"][0]["finish_reason"] == "length"
    assert refused.status_code == 400


async def test_a_priority_is_a_number_of_32_bits(scripted: StartScripted) -> None:
    server = await scripted("one", max_running=1, max_waiting=0)
    async with http(server) as client:
        for value in ("high", "", str(1 << 31), str(-(1 << 31) - 1), str(1 << 70), "9" * 5000):
            headers = FLEET | {"x-penstock-priority": value}
            refused = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert refused.status_code == 400
            assert "'x-penstock-priority' must be a whole number" in error_of(refused.content)["message"]
        for value in (str((1 << 31) - 1), str(-(1 << 31))):
            headers = FLEET | {"x-penstock-priority": value}
            assert (await client.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200


async def test_a_full_queue_is_a_503_with_retry_after(scripted: StartScripted) -> None:
    server = await scripted("word " * 15, step_s=0.05, max_running=1, max_waiting=1)
    async with http(server) as client:
        running = [asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY)) for _ in range(2)]
        await until(lambda: server.engine.open_requests == 2)
        for stream in (False, True):
            refused = await client.post("/v1/chat/completions", json=BODY | {"stream": stream})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["content-type"] == "application/json"
            assert error_of(refused.content)["code"] == "engine_overloaded"
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("metered", [False, True])
async def test_a_hang_up_stops_the_engine_within_a_second(scripted: StartScripted, stream: bool, metered: bool) -> None:
    server = await scripted("word " * 200, step_s=0.05)
    headers = FLEET | ({"x-penstock-meter": "1"} if metered else {})
    client = http(server)
    asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"stream": stream}, headers=headers))
    await until(lambda: server.engine.stats.steps > 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.aclose()
    assert await until(lambda: server.engine.open_requests == 0) < 1.0
    assert await until(lambda: server.engine.stats.running == 0) < 1.0


async def test_a_hang_up_while_waiting_for_a_place(scripted: StartScripted) -> None:
    server = await scripted("word " * 20, step_s=0.05, max_running=1)
    async with http(server) as client:
        first = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
        await until(lambda: server.engine.open_requests == 1)
        impatient = http(server)
        second = asyncio.ensure_future(impatient.post("/v1/chat/completions", json=BODY | {"stream": True}))
        await until(lambda: server.engine.open_requests == 2)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await impatient.aclose()
        assert await until(lambda: server.engine.open_requests == 1) < 1.0
        assert (await first).status_code == 200


async def test_silence_is_filled_with_comments(scripted: StartScripted) -> None:
    server = await scripted("one two three four five six", step_s=0.05, max_running=1, keepalive_s=0.1)
    async with http(server) as client:
        first = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"stream": True}))
        await until(lambda: server.engine.open_requests == 1)
        second = await client.post("/v1/chat/completions", json=BODY | {"stream": True})
        await first
    found = frames(second.content)
    assert isinstance(found[0], Comment)
    assert found[0].text == b"keep-alive"
    assert [frame.data for frame in found if isinstance(frame, Event)][-1] == b"[DONE]"


async def test_an_engine_killed_in_mid_answer_fails_it_loudly(scripted: StartScripted) -> None:
    server = await scripted("word " * 200, step_s=0.05)
    async with http(server) as client:
        metered = FLEET | {"x-penstock-meter": "1"}
        whole = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
        stream = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"stream": True}))
        metered_whole = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY, headers=metered))
        await until(lambda: server.engine.open_requests == 3 and server.engine.stats.steps > 4)
        os.kill(server.engine_pid, signal.SIGKILL)
        failed = await whole
        assert failed.status_code == 500
        assert error_of(failed.content)["code"] == "engine_dead"
        for cut in (await stream, await metered_whole):
            events = [frame.data for frame in frames(cut.content) if isinstance(frame, Event)]
            assert error_of(events[-1])["code"] == "engine_dead"
            assert not any(event == b"[DONE]" or b'"finish_reason":"' in event for event in events)
        after = await client.post("/v1/chat/completions", json=BODY)
        assert after.status_code == 500
        assert error_of(after.content)["code"] == "engine_dead"
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")


async def test_the_sdk_sees_a_dead_engine_as_an_error(scripted: StartScripted) -> None:
    server = await scripted("word " * 200, step_s=0.05)
    async with sdk(server) as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        await anext(stream)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(APIError, match="engine stopped"):
            await collect(stream)
        with pytest.raises(InternalServerError):
            await client.chat.completions.create(**BODY)


async def test_a_draining_worker_ends_what_runs_and_takes_nothing_new(scripted: StartScripted) -> None:
    server = await scripted("word " * 20, step_s=0.02)
    async with http(server) as client:
        running = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
        await until(lambda: server.engine.open_requests == 1)
        server.door.draining = True
        refused = await client.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert error_of(refused.content)["code"] == "worker_stopping"
        assert refused.headers["retry-after"] == "1"
        assert (await client.get("/health")).json()["status"] == "draining"
        assert not running.done()
        await server.door.wait_idle()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"


async def test_many_streams_at_once(scripted: StartScripted) -> None:
    server = await scripted(TEXT, step_s=0.005, max_running=4, max_waiting=64)
    async with sdk(server) as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(**BODY, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(ask() for _ in range(24))) == [TEXT] * 24
    await until(lambda: server.engine.open_requests == 0)
