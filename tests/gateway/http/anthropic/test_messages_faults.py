"""What goes wrong behind the Messages door, and what keeps a stream alive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.gateway.conftest import chunk_event
from tests.gateway.tenants.support import budget, requests_per_minute

PATH = "/v1/messages"
ASK: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


def sdk_of(gateway: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


async def answers(c: Any) -> None:
    await c.begin()
    await c.token("Pa", 1)
    await c.event(chunk_event("ris", finish="stop"))
    await c.done()


async def test_a_fault_in_mid_stream_is_an_error_event_and_the_end(gateway: Any, upstream: Any) -> None:
    async def breaks_off(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)

    async def tells_an_error(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await c.event(b'{"error":{"message":"out of memory","type":"server_error","param":null,"code":"engine_dead"}}')

    async def never_says_why(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        await c.done()

    await gateway.register(await upstream(breaks_off, tells_an_error, never_says_why))
    async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": gateway.key}, timeout=20) as client:
        answer = await client.post(PATH, json=ASK | {"stream": True})
    *_, told = answer.text.strip().split("\n\n")
    event, data = told.split("\n")
    assert event == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["error"]["type"] == "api_error"
    assert error["request_id"] == answer.headers["request-id"]
    assert "message_delta" not in answer.text
    assert "message_stop" not in answer.text
    async with sdk_of(gateway) as sdk:
        for said in ("out of memory", "does not say why"):
            with pytest.raises(anthropic.APIStatusError, match=said):
                async with sdk.messages.stream(**ASK) as stream:
                    await stream.get_final_message()
    rows = await gateway.rows(3)
    assert [(row.api, row.status) for row in rows] == [("messages", "failed")] * 3


async def test_a_hang_up_reaches_the_backend(gateway: Any, upstream: Any) -> None:
    closed: list[float] = []

    async def generates(c: Any) -> None:
        await c.begin()
        await (c.token("Par", 1) if c.body.get("stream") else c.meter(9, 1))
        closed.append(await c.wait_closed_by_peer())

    await gateway.register(await upstream(generates))
    async with sdk_of(gateway) as sdk:
        async with sdk.messages.stream(**ASK) as stream:
            async for event in stream:
                if event.type == "text":
                    break
        with pytest.raises(anthropic.APITimeoutError):
            await sdk.with_options(timeout=0.2).messages.create(**ASK)
    rows = await gateway.rows(2)
    assert [(row.status, row.completion_tokens) for row in rows] == [("aborted", 1)] * 2
    assert len(closed) == 2


async def test_pings_keep_a_silent_stream_alive(start_gateway: Any, upstream: Any) -> None:
    async def thinks(c: Any) -> None:
        await c.begin()
        await asyncio.sleep(0.25)
        await c.token("Paris", 1)
        await asyncio.sleep(0.25)
        await c.event(chunk_event("", finish="stop"))
        await c.done()

    async with start_gateway(keepalive_s=0.1) as gateway:
        await gateway.register(await upstream(thinks))
        async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": gateway.key}, timeout=20) as client:
            answer = await client.post(PATH, json=ASK | {"stream": True})
        events = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
        assert events[0] == "ping"
        assert (
            events.index("message_start") < len(events) - 1 - events[::-1].index("ping") < events.index("message_stop")
        )
        async with sdk_of(gateway) as sdk, sdk.messages.stream(**ASK) as stream:
            assert await stream.get_final_text() == "Paris"


async def test_limits_say_what_waiting_helps(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(limits=[requests_per_minute(3), budget(600_000)]) as gateway:
        await gateway.register(await upstream(answers))
        async with sdk_of(gateway) as sdk:
            with pytest.raises(anthropic.RateLimitError) as poor:
                await sdk.messages.create(**ASK | {"max_tokens": 500})
            assert (poor.value.type, poor.value.response.headers["x-should-retry"]) == ("billing_error", "false")
            for _ in range(3):
                await sdk.messages.create(**ASK, stream=True)
            with pytest.raises(anthropic.RateLimitError) as hasty:
                await sdk.messages.create(**ASK)
            assert hasty.value.type == "rate_limit_error"
            assert int(hasty.value.response.headers["retry-after"]) > 0
            # Counting is not held up by limits, and costs nothing.
            assert (await sdk.messages.count_tokens(model="m", messages=ASK["messages"])).input_tokens > 0


async def test_the_same_idempotency_key_runs_once(gateway: Any, upstream: Any) -> None:
    server = await upstream(answers)
    await gateway.register(server)
    headers = {"x-api-key": gateway.key, "idempotency-key": "once"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
        first = await client.post(PATH, json=ASK | {"stream": True})
        again = await client.post(PATH, json=ASK | {"stream": True})
        other = await client.post(PATH, json=ASK | {"max_tokens": 7})
    assert first.text == again.text
    assert again.headers["idempotent-replayed"] == "true"
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")
    assert len(server.seen) == 1
    assert [row.status for row in await gateway.rows(2)] == ["ok", "replayed"]
