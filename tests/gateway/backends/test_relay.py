"""Attempts: which faults are tried again, on what, and what is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from gateway.backends.backend import Order
from gateway.backends.fleet_worker import FleetWorker
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint
from tests.gateway.backends.relay_support import (
    Rig,
    eventually,
    read,
    read_until_fault,
)
from worker.protocol.errors import ApiError


async def cut_between_events(c: Any) -> None:
    await c.begin()
    await c.token("Par", 1)
    await asyncio.sleep(0.05)


async def cut_inside_an_event(c: Any) -> None:
    await cut_between_events(c)
    await c.send_piece(b'data: {"choices":[{"delta":{"cont')


async def reset(c: Any) -> None:
    await cut_between_events(c)
    c.reset()


async def ends_without_done(c: Any) -> None:
    await cut_between_events(c)
    await c.send(b"0\r\n\r\n")


@pytest.mark.parametrize("script", [cut_between_events, cut_inside_an_event, reset, ends_without_done])
async def test_a_cut_in_mid_stream_is_a_fault_and_not_tried_again(rig: Rig, upstream: Any, script: Any) -> None:
    server = await upstream(script)
    rig.use(server.url, server.url)
    exchange = rig.open()
    found, fault = await read_until_fault(exchange)
    assert found[0] == json.dumps(json.loads(found[0]), ensure_ascii=False, separators=(",", ":")).encode()
    assert b"Par" in found[0]
    assert fault.code == "backend_disconnected"
    assert fault.error().status == 502
    assert exchange.usage == TokenUsage(9, 1)
    assert len(server.seen) == 1
    assert not exchange.complete


async def test_an_error_event_before_the_first_token_goes_to_the_next_backend(rig: Rig, upstream: Any) -> None:
    async def fails(c: Any) -> None:
        await c.begin()
        await c.event(b'{"error":{"message":"no memory","type":"server_error","code":"oom"}}')

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("Paris", 1)
        await c.done()

    bad, good = await upstream(fails), await upstream(answer)
    rig.use(bad.url, good.url, in_turn=True)
    exchange = rig.open()
    assert len(await read(exchange)) == 1
    assert exchange.attempts == 2
    assert exchange.backend_id == "w1"


@pytest.mark.parametrize(("code", "status"), [("worker_stopping", 503), ("engine_dead", 502)])
async def test_a_prefill_that_fails_is_metered_and_has_a_status(
    rig: Rig, upstream: Any, code: str, status: int
) -> None:
    """The meter runs before the first event; the answer may still fail then as if nothing of it had come."""

    async def fails(c: Any) -> None:
        await c.begin()
        await c.meter(512, 0)
        await eventually(lambda: bool(rig.checkpoints))
        await c.event(b'{"error":{"message":"no","type":"server_error","param":null,"code":"%s"}}' % code.encode())

    server = await upstream(fails)
    rig.use(server.url)
    exchange = rig.open()
    found, fault = await read_until_fault(exchange)
    assert found == []
    assert not exchange.handed_on
    assert (fault.status, fault.code) == (status, code)
    assert fault.error().headers == ({"retry-after": "1"} if status == 503 else {})
    assert rig.checkpoints[0][0] == TokenUsage(512, 0)


async def test_an_error_event_with_a_status_keeps_it_and_a_bad_request_is_not_repeated(rig: Rig, upstream: Any) -> None:
    async def refuses(c: Any) -> None:
        await c.begin()
        await c.event(b'{"error":{"message":"too long","type":"BadRequest","code":400}}')

    server = await upstream(refuses)
    rig.use(server.url, server.url)
    _, fault = await read_until_fault(rig.open())
    assert fault.status == 400
    assert len(server.seen) == 1


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_lost_before_the_head_is_tried_once_more_on_the_only_backend(
    rig: Rig, upstream: Any, how: str
) -> None:
    async def lost(c: Any) -> None:
        if how == "reset":
            c.reset()

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    server = await upstream(lost, answer)
    rig.use(server.url)
    exchange = rig.open()
    assert len(await read(exchange)) == 1
    assert exchange.attempts == 2

    server = await upstream(lost)
    rig.use(server.url)
    exchange = rig.open()
    _, fault = await read_until_fault(exchange)
    assert fault.code == "backend_disconnected"
    assert exchange.attempts == 2


async def test_an_endpoint_that_cannot_be_reached_is_set_aside(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    gone, good = await upstream(answer), await upstream(answer)
    await gone.stop()
    rig.use(gone.url, good.url, in_turn=True)
    attempts = []
    for _ in range(6):
        exchange = rig.open()
        await read(exchange)
        attempts.append(exchange.attempts)
    assert sum(attempts) == 7  # one try in vain, then it comes last
    assert len(good.seen) == 6


@pytest.mark.parametrize("url", ["http://h:99999", "http://[", "http://a..b:80"])
async def test_a_url_that_cannot_be_one_is_as_an_endpoint_that_cannot_be_reached(
    rig: Rig, upstream: Any, url: str
) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    good = await upstream(answer)
    rig.use(url, good.url)
    for _ in range(2):
        await read(rig.open())
    assert len(good.seen) == 2


async def test_no_backend_and_an_unreachable_one_are_a_503_with_retry_after(rig: Rig, upstream: Any) -> None:
    exchange = rig.open()
    _, fault = await read_until_fault(exchange)
    assert exchange.attempts == 0
    assert (fault.error().status, fault.code) == (503, "no_backend_available")
    server = await upstream(cut_between_events)
    await server.stop()
    rig.use(server.url)
    _, fault = await read_until_fault(rig.open())
    assert (fault.error().status, fault.code) == (503, "no_backend_available")
    assert "retry-after" in fault.error().headers


async def test_six_attempts_at_most(rig: Rig, upstream: Any) -> None:
    async def fails(c: Any) -> None:
        await c.status(500, b"")

    server = await upstream(fails)
    rig.use(*[server.url] * 8)
    exchange = rig.open()
    await read_until_fault(exchange)
    assert exchange.attempts == len(server.seen) == 6


@pytest.mark.parametrize("phase", ["before the head", "before the first event", "in mid-stream"])
async def test_leaving_closes_the_connection_to_the_backend_at_once(rig: Rig, upstream: Any, phase: str) -> None:
    closed: list[float] = []
    began = asyncio.Event()

    async def generates(c: Any) -> None:
        if phase != "before the head":
            await c.begin()
        if phase == "in mid-stream":
            await c.token("a", 1)
        began.set()
        closed.append(await c.wait_closed_by_peer())

    rig.use((await upstream(generates)).url)

    async def client() -> None:
        async with rig.open() as exchange:
            while True:
                await exchange.events()

    task = asyncio.ensure_future(client())
    await began.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: bool(closed))
    assert closed[0] < 1.0
    assert rig.balancer.in_flight() == {}


async def test_a_complete_answer_leaves_the_connection_for_the_next(rig: Rig, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.event(b"[DONE]")
        await asyncio.sleep(0.02)
        await c.send(b"0\r\n\r\n")

    server = await upstream(answer, keep_alive=True)
    rig.use(server.url)
    for _ in range(3):
        await read(rig.open())
    assert len(server.seen) == 3
    assert server.connections == 1


async def test_requests_in_flight_are_counted_until_they_end(rig: Rig, upstream: Any) -> None:
    release = asyncio.Event()

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await release.wait()
        await c.done()

    rig.use((await upstream(answer)).url)
    reading: Awaitable[list[bytes]] = asyncio.ensure_future(read(rig.open()))
    await eventually(lambda: rig.balancer.in_flight() == {"w0": 1})
    release.set()
    await reading
    assert rig.balancer.in_flight() == {}


async def test_a_family_that_has_no_words_for_a_request_leaves_it_to_others(rig: Rig, upstream: Any) -> None:
    class Speechless(FleetWorker):
        def outgoing(self, order: Order, endpoint: Endpoint, model: str) -> Any:
            raise ApiError(400, "This cannot be told there.")

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    server = await upstream(answer)
    rig.relay.backends = {"penstock": FleetWorker(None), "anthropic": Speechless(None)}
    rig.use(server.url)
    able = rig.alive[0]
    unable = Endpoint("u", "pool", server.url, "m", 1000, family="anthropic", priority=-1)
    rig.alive[:] = [unable, able]
    exchange = rig.open()
    assert len(await read(exchange)) == 1
    assert (exchange.attempts, exchange.backend_id, exchange.failed_attempts) == (1, "w0", [])
    rig.alive[:] = [unable]
    with pytest.raises(ApiError, match="cannot be told"):
        await rig.open().events()
