"""How long backends may take, in each phase, and what becomes of a client meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest

from gateway.backends.backend import Order
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.openai_reader import WholeReader
from gateway.backends.time_limits import TimeLimits
from gateway.routing.route import Endpoint
from tests.gateway.backends.relay_support import TOKEN, Rig, black_hole, eventually, read, read_until_fault, rigged


class AnswersInJson(FleetWorker):
    def reader(self, order: Order, endpoint: Endpoint, media_type: str) -> Any:
        return WholeReader(order)


async def silent(c: Any) -> None:
    await c.wait_closed_by_peer()


async def drips(c: Any, data: bytes) -> None:
    """Sends ``data`` again and again until the gateway hangs up."""
    with contextlib.suppress(ConnectionError):
        for _ in range(300):
            await c.send_piece(data)
            await asyncio.sleep(0.02)


async def drips_an_event_that_does_not_end(c: Any) -> None:
    await c.begin()
    await c.send_piece(b"data: ")
    await drips(c, b"x")


async def drips_comments(c: Any) -> None:
    await c.begin()
    await drips(c, b": PROCESSING\n\n")


async def answers(c: Any) -> None:
    await c.begin()
    await c.token("Paris", 1)
    await c.done()


async def test_a_backend_that_never_answers_is_given_up(upstream: Any) -> None:
    server = await upstream(silent)
    async with rigged(first_byte_s=0.2) as rig:
        rig.use(server.url)
        _, fault = await read_until_fault(rig.open())
    assert fault.code == "backend_timeout"
    assert fault.error().status == 504
    await eventually(lambda: not server.failures)


@pytest.mark.parametrize("script", [silent, drips_an_event_that_does_not_end, drips_comments])
async def test_one_that_tells_nothing_of_an_answer_is_left_for_the_next(upstream: Any, script: Any) -> None:
    bad, good = await upstream(script), await upstream(answers)
    async with rigged(first_byte_s=0.2) as rig:
        rig.use(bad.url)
        exchange = rig.open()
        async with exchange:
            assert await exchange.events(wait_s=0.05) == []
            rig.use(bad.url, good.url)
            assert len(await exchange.events()) == 1
    assert exchange.failed_attempts == ["w0 backend_timeout"]
    assert exchange.backend_id == "w1"


async def test_running_usage_tells_of_an_answer(upstream: Any) -> None:
    """A long prompt is being worked on: our workers say so by their meter."""

    async def prefills(c: Any) -> None:
        await c.begin()
        for tokens in range(1, 15):
            await c.meter(tokens, 0)
            await asyncio.sleep(0.03)
        await c.token("Paris", 1)
        await c.done()

    async with rigged(first_byte_s=0.3) as rig:
        rig.use((await upstream(prefills)).url)
        exchange = rig.open()
        assert len(await read(exchange)) == 1
    assert exchange.attempts == 1


async def test_silence_before_the_first_event_moves_on_and_in_mid_stream_ends_it(upstream: Any) -> None:
    async def no_event(c: Any) -> None:
        await c.begin()
        await c.wait_closed_by_peer()

    async def stalls(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.wait_closed_by_peer()

    first, second = await upstream(no_event), await upstream(stalls)
    async with rigged(first_byte_s=0.2, idle_s=0.2) as rig:
        rig.use(first.url)
        exchange = rig.open()
        async with exchange:
            assert await exchange.events(wait_s=0.01) == []
            rig.use(first.url, second.url)
            found, fault = await read_until_fault(exchange)
    assert len(found) == 1
    assert exchange.attempts == 2
    assert fault.code == "backend_timeout"


async def test_in_mid_stream_comments_are_signs_of_life(upstream: Any) -> None:
    async def thinks(c: Any) -> None:
        await c.begin()
        await c.token("Par", 1)
        for _ in range(20):
            await c.send_piece(b": thinking\n\n")
            await asyncio.sleep(0.03)
        await c.token("is", 2)
        await c.done()

    async with rigged(idle_s=0.3) as rig:
        rig.use((await upstream(thinks)).url)
        assert len(await read(rig.open())) == 2


async def test_a_json_body_may_come_slowly_once_it_came(upstream: Any) -> None:
    """Nothing of it can be handed on before its end, so its first bytes are the first that tell of an answer."""
    body = b'{"choices":[{"message":{"content":"Paris"}}]}'

    async def slowly(c: Any) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{c.ending}\r\n"
        await c.send(head.encode())
        for byte in body:
            await c.send(bytes([byte]))
            await asyncio.sleep(0.01)

    async with rigged(first_byte_s=0.2) as rig:
        rig.relay.backends = {"penstock": AnswersInJson(TOKEN)}
        rig.use((await upstream(slowly)).url)
        assert await read(rig.open(streamed=False)) == [body]


@pytest.mark.parametrize("phase", ["connecting", "head", "first event", "stream", "comments", "error"])
async def test_the_time_limit_of_the_route_holds_in_every_phase(upstream: Any, phase: str) -> None:
    async def slow(c: Any) -> None:
        if phase == "head":
            await silent(c)
        if phase == "error":
            await c.send(b"HTTP/1.1 500 X\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                for _ in range(300):
                    await c.send(b" ")
                    await asyncio.sleep(0.02)
            return
        await c.begin()
        if phase == "first event":
            await silent(c)
        if phase == "comments":
            with contextlib.suppress(ConnectionError):
                while True:  # as fast as they are read
                    await c.send_piece(b": thinking\n\n" * 1000)
        for number in range(1000):
            await c.token("a", number + 1)
            await asyncio.sleep(0.02)

    async with rigged() as rig, black_hole() as nowhere:
        server = await upstream(slow)
        rig.use(nowhere if phase == "connecting" else server.url)
        exchange = rig.open(total_s=0.3)
        found, fault = await read_until_fault(exchange)
    assert bool(found) == (phase == "stream")
    assert (fault.code, fault.status) == ("request_timeout", 504)
    assert exchange.failed_attempts == ["w0 request_timeout"]
    assert exchange.elapsed_ms() < 3000


async def test_with_all_backends_down_the_answer_comes_at_the_deadline_at_the_latest(upstream: Any) -> None:
    gone = await upstream(answers)
    await gone.stop()
    async with rigged(connect_s=0.1) as rig, black_hole() as one, black_hole() as other:
        rig.use(gone.url, one, other)
        exchange = rig.open()
        _, fault = await read_until_fault(exchange)
        assert (fault.code, fault.status, exchange.attempts) == ("no_backend_available", 503, 3)
        assert exchange.elapsed_ms() < 3000
    async with rigged(connect_s=30.0) as rig, black_hole() as one, black_hole() as other:
        rig.use(one, other)
        exchange = rig.open(total_s=0.2)
        _, fault = await read_until_fault(exchange)
        assert (fault.code, exchange.attempts) == ("request_timeout", 1)


@pytest.mark.parametrize("first_s", [0.0, 0.4])
async def test_who_was_silent_until_the_deadline_is_blamed_if_it_had_most_of_the_time(
    rig: Rig, upstream: Any, first_s: float
) -> None:
    async def fails(c: Any) -> None:
        await asyncio.sleep(first_s)
        await c.status(500, b"")

    told: list[tuple[str, bool]] = []
    failed = rig.balancer.failed

    def listening(endpoint: Endpoint, *, unhealthy: bool, **more: Any) -> None:
        told.append((endpoint.id, unhealthy))
        failed(endpoint, unhealthy=unhealthy, **more)

    rig.balancer.failed = listening  # type: ignore[method-assign]
    rig.use((await upstream(fails)).url, (await upstream(silent)).url, in_turn=True)
    _, fault = await read_until_fault(rig.open(total_s=0.5))
    assert fault.code == "request_timeout"
    assert told == [("w0", True)] + [("w1", True)] * (not first_s)


async def test_nothing_is_tried_again_when_no_time_is_left(rig: Rig, upstream: Any) -> None:
    async def fails_late(c: Any) -> None:
        await asyncio.sleep(0.27)
        await c.status(500, b"")

    server = await upstream(fails_late)
    rig.use(server.url, server.url)
    exchange = rig.open(total_s=0.3)
    await read_until_fault(exchange)
    assert len(server.seen) == exchange.attempts == 1


@pytest.mark.parametrize("own", ["connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s"])
async def test_an_endpoint_may_have_limits_of_its_own(upstream: Any, own: str) -> None:
    async def stalls(c: Any) -> None:
        if own == "idle_timeout_s":
            await c.begin()
            await c.token("a", 1)
        await c.wait_closed_by_peer()

    async with rigged(connect_s=30.0, first_byte_s=30.0, idle_s=30.0) as rig, black_hole() as nowhere:
        url = nowhere if own == "connect_timeout_s" else (await upstream(stalls)).url
        rig.use(url, **{own: 0.1})
        exchange = rig.open()
        _, fault = await read_until_fault(exchange)
    assert fault.code == ("no_backend_available" if own == "connect_timeout_s" else "backend_timeout")
    assert exchange.elapsed_ms() < 5000


def test_what_an_endpoint_does_not_say_is_as_the_gateway_has_it() -> None:
    limits = TimeLimits(1.0, 2.0, 3.0)
    assert limits.of(Endpoint("w", "pool", "http://w", "m", 1)) is limits
    own = Endpoint("w", "pool", "http://w", "m", 1, first_byte_timeout_s=0.0, idle_timeout_s=9.0)
    assert limits.of(own) == TimeLimits(1.0, 0.0, 9.0)


@pytest.mark.parametrize("phase", ["connecting", "head", "first event"])
async def test_waiting_returns_empty_handed_and_loses_nothing(rig: Rig, upstream: Any, phase: str) -> None:
    """The door sends a sign of life each time; the attempt goes on."""

    async def slow(c: Any) -> None:
        if phase == "head":
            await asyncio.sleep(0.3)
        await c.begin()
        if phase == "first event":
            await asyncio.sleep(0.3)
        await c.token("late", 1)
        await c.done()

    server = await upstream(slow)
    async with rigged(connect_s=0.3) as rig, black_hole() as nowhere:
        rig.use(nowhere if phase == "connecting" else server.url)
        async with rig.open() as exchange:
            waits = 0
            while not (found := await exchange.events(wait_s=0.05)):
                waits += 1
                if waits == 2:
                    rig.use(rig.alive[0].base_url, server.url)
                assert not exchange.complete
    assert waits >= 2
    assert b"late" in found[0]
    assert len(server.seen) == 1
    assert exchange.attempts == (2 if phase == "connecting" else 1)


async def test_a_flood_without_events_does_not_keep_the_client_from_signs_of_life(rig: Rig, upstream: Any) -> None:
    async def floods(c: Any) -> None:
        await c.begin()
        with contextlib.suppress(ConnectionError):
            while True:
                await c.send_piece(b": thinking\n\n" * 1000)

    rig.use((await upstream(floods)).url)
    async with rig.open() as exchange:
        for _ in range(3):
            assert await exchange.events(wait_s=0.05) == []


@pytest.mark.parametrize("phase", ["connecting", "head", "first event", "stream", "error"])
@pytest.mark.parametrize("waiting", [True, False])
async def test_leaving_closes_the_connection_at_once_and_leaves_nothing_behind(
    upstream: Any, phase: str, waiting: bool
) -> None:
    """Whether it comes while the exchange waits for the backend or between two calls."""
    closed: list[float] = []
    began = asyncio.Event()

    async def generates(c: Any) -> None:
        if phase == "error":
            await c.send(b"HTTP/1.1 500 X\r\ncontent-length: 100\r\n\r\n{")
        elif phase != "head":
            await c.begin()
        if phase == "stream":
            await c.token("a", 1)
        began.set()
        closed.append(await c.wait_closed_by_peer())

    server = await upstream(generates)
    async with rigged() as rig, black_hole() as nowhere:
        rig.use(nowhere if phase == "connecting" else server.url)
        files = len(os.listdir("/proc/self/fd"))
        tasks = asyncio.all_tasks()

        async def client() -> None:
            async with rig.open() as exchange:
                while True:
                    await exchange.events(wait_s=None if waiting else 0.05)
                    if not waiting and (began.is_set() or phase == "connecting"):
                        return

        reading = asyncio.ensure_future(client())
        if phase == "connecting":
            await asyncio.sleep(0.1)
        else:
            await began.wait()
            await asyncio.sleep(0.02)
        if waiting:
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await reading
        assert rig.in_flight() == {}
        if phase != "connecting":
            await eventually(lambda: bool(closed))
            assert closed[0] < 1.0
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
        await eventually(lambda: not asyncio.all_tasks() - tasks - {asyncio.current_task()} - server.talking)


async def test_leaving_while_a_second_backend_is_asked_closes_that_one(rig: Rig, upstream: Any) -> None:
    closed: list[float] = []
    began = asyncio.Event()

    async def fails(c: Any) -> None:
        await c.status(500, b"")

    async def generates(c: Any) -> None:
        began.set()
        closed.append(await c.wait_closed_by_peer())

    rig.use((await upstream(fails)).url, (await upstream(generates)).url, in_turn=True)
    reading = asyncio.ensure_future(read(rig.open()))
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(lambda: bool(closed))
    assert closed[0] < 1.0
    assert rig.in_flight() == {}
