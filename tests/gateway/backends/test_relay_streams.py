"""What comes through the relay: events as they were sent, and what they tell of tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.billing.usage import TokenUsage
from gateway.routing.route import Target
from tests.gateway.backends.relay_support import (
    TOKEN,
    USAGE_CHUNK,
    Rig,
    read,
    read_until_fault,
    token,
)


async def test_relays_events_and_meters_them(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await c.token("is", 2)
        await c.meter(9, 3)
        await c.done()

    server = await upstream(answer)
    rig.use(server.url)
    exchange = rig.open(clamp_output=True, weight=2.5)
    found = await read(exchange)
    assert [json.loads(data)["choices"][0]["delta"]["content"] for data in found] == ["Par", "is"]
    assert exchange.usage == TokenUsage(9, 3)
    assert rig.checkpoints[-1] == (TokenUsage(9, 3), "w0")
    assert exchange.attempts == 1
    assert exchange.first_token_ms is not None
    sent = server.seen[0].headers
    assert sent["authorization"] == f"Bearer {TOKEN}"
    assert sent["x-request-id"] == "0199"
    assert sent["x-penstock-tenant-salt"] == "s"
    assert (sent["x-penstock-tenant"], sent["x-penstock-weight"]) == ("0198-t", "2.5")
    assert sent["x-penstock-meter"] == "1"
    assert sent["x-penstock-clamp-output"] == "1"
    assert "cookie" not in sent
    assert server.seen[0].raw == b'{"model":"m","max_tokens":100}'


async def test_the_data_of_events_is_passed_on_byte_for_byte(rig: Rig, upstream: Any) -> None:
    strange = (
        b'{ "choices" : [ {"delta":{"content":"\\u00e9 \xf0\x9f\x98\x80 \\"error\\" usage"},'
        b'"logprobs":{"x":1.50}} ],"new":1e2}'
    )

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.event(strange)
        await c.done()

    rig.use((await upstream(answer)).url)
    assert (await read(rig.open()))[1] == strange


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
async def test_events_cut_at_every_byte_come_out_whole(rig: Rig, upstream: Any, newline: bytes) -> None:
    text = (
        b': penstock-meter {"prompt_tokens":9,"completion_tokens":1}\ndata: ' + token("né😀") + b"\n\ndata: [DONE]\n\n"
    )

    async def answer(c: Any) -> None:
        await c.begin()
        for byte in text.replace(b"\n", newline):
            await c.send_piece(bytes([byte]))
            await asyncio.sleep(0)
        await c.send(b"0\r\n\r\n")

    rig.use((await upstream(answer)).url)
    exchange = rig.open()
    assert await read(exchange) == [token("né😀")]
    assert exchange.usage == TokenUsage(9, 1)


async def test_an_error_event_in_mid_stream_is_a_fault_with_the_backends_words(rig: Rig, upstream: Any) -> None:
    error = {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_dead"}}

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await c.event(json.dumps(error).encode())
        await c.done()

    rig.use((await upstream(answer)).url)
    found, fault = await read_until_fault(rig.open())
    assert len(found) == 1
    assert fault.code == "engine_dead"
    assert json.loads(fault.error().encode()) == error


async def test_content_that_speaks_of_errors_is_no_error(rig: Rig, upstream: Any) -> None:
    events = [token("error"), token('{"error": {"message": "x"}}'), token(None, error=None)]

    async def answer(c: Any) -> None:
        await c.begin()
        for data in events:
            await c.event(data)
        await c.done()

    rig.use((await upstream(answer)).url)
    assert await read(rig.open()) == events


async def test_tokens_of_a_stream_without_usage_are_estimated(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        for text in "abc":
            await c.event(token(text, usage=None))
        await c.done()

    rig.use((await upstream(answer)).url)
    exchange = rig.open()
    assert len(await read(exchange)) == 3
    assert exchange.usage == TokenUsage(25, 3, source="estimated")
    # Some events have no token, as the first and the last of a chat: never more than what was reserved.
    exchange = rig.open(output_tokens=2, prompt_bytes=10**6)
    assert len(await read(exchange)) == 3
    assert exchange.usage == TokenUsage(1000, 2, source="estimated")


@pytest.mark.parametrize("wanted", [False, True])
async def test_the_usage_chunk_is_read_and_handed_on_only_if_asked_for(rig: Rig, upstream: Any, wanted: bool) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.event(token("a"))
        await c.event(USAGE_CHUNK)
        await c.done()

    rig.use((await upstream(answer)).url)
    exchange = rig.open(include_usage=wanted)
    assert await read(exchange) == [token("a"), *([USAGE_CHUNK] if wanted else [])]
    assert exchange.usage == TokenUsage(5, 2, 4)


async def test_the_meter_counts_more_than_the_usage_chunk_and_its_last_reading_most(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.event(USAGE_CHUNK)
        await c.meter(9, 4)
        await c.done()

    rig.use((await upstream(answer)).url)
    exchange = rig.open()
    await read(exchange)
    assert exchange.usage == TokenUsage(9, 4)


async def test_usage_of_zero_is_a_value(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("", 0, prompt=0)
        await c.done()

    rig.use((await upstream(answer)).url)
    exchange = rig.open()
    await read(exchange)
    assert exchange.usage == TokenUsage(0, 0)


async def test_a_line_without_end_is_a_fault(rig: Rig, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backends.openai_reader.EVENT_LIMIT", 100_000)

    async def huge(c: Any) -> None:
        await c.begin()
        for _ in range(200):
            await c.send_piece(b"data: " + b"x" * 1000)
        await c.wait_closed_by_peer()

    rig.use((await upstream(huge)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.code == "backend_protocol_error"


async def test_a_long_event_within_the_limit_passes(rig: Rig, upstream: Any) -> None:
    data = token("x" * 300_000)

    async def answer(c: Any) -> None:
        await c.begin()
        await c.event(data)
        await c.done()

    rig.use((await upstream(answer)).url)
    assert await read(rig.open()) == [data]


async def test_a_whole_answer_comes_as_one_event(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.whole()

    server = await upstream(answer)
    rig.use(server.url)
    exchange = rig.open(streamed=False)
    (body,) = await read(exchange)
    assert json.loads(body)["choices"][0]["message"]["content"] == "Paris"
    assert exchange.usage == TokenUsage(9, 3)


async def test_the_model_is_called_by_the_name_the_client_used(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1, model="internal-name")
        await c.done()

    rig.use((await upstream(answer)).url)
    (data,) = await read(rig.open(model="public", targets=(Target("pool", "internal-name"),)))
    assert json.loads(data)["model"] == "public"


async def test_done_before_any_event_is_no_answer(rig: Rig, upstream: Any) -> None:
    async def nothing(c: Any) -> None:
        await c.begin()
        await c.done()

    rig.use((await upstream(nothing)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.code == "backend_protocol_error"
