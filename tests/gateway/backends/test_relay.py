"""The relay against backends that misbehave in every way their operators report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.backends.backend import Order
from gateway.backends.faults import BackendError, BackendFault
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.relay import Exchange, Relay
from gateway.backends.time_limits import TimeLimits
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.routing.policy import Balancer
from gateway.routing.route import Endpoint, Target

TOKEN = "fleet-token-of-the-tests"
USAGE_CHUNK = (
    b'{"id":"c","object":"chat.completion.chunk","choices":[],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)


def token(text: str | None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    return json.dumps({"model": "m", "choices": [{"index": 0, "delta": delta}]} | more, ensure_ascii=False).encode()


@dataclass
class Rig:
    relay: Relay
    balancer: Balancer
    checkpoints: list[tuple[TokenUsage, str]] = field(default_factory=list)
    alive: list[Endpoint] = field(default_factory=list)

    def use(self, *urls: str) -> None:
        self.alive[:] = [Endpoint(f"w{number}", "pool", url, "m", 1000) for number, url in enumerate(urls)]

    def open(self, *, total_s: float = 20.0, **changes: Any) -> Exchange:
        values: dict[str, Any] = {
            "request_id": "0199",
            "model": "m",
            "targets": (Target("pool", "m"),),
            "context_length": 1000,
            "body": {},
            "output_cap": 100,
            "streamed": True,
            "include_usage": False,
            "clamp_output": False,
            "salt": "s",
            "tenant": "0198-t",
            "prompt_bytes": 100,
        }
        order = Order(**(values | changes))
        return self.relay.open(
            order, total_s=total_s, checkpoint=lambda usage, id: self.checkpoints.append((usage, id))
        )


@asynccontextmanager
async def rigged(**limits: float) -> AsyncIterator[Rig]:
    alive: list[Endpoint] = []
    balancer = Balancer(lambda pool: alive if pool == "pool" else [], SystemClock())
    times = TimeLimits(**({"connect_s": 2.0, "first_byte_s": 10.0, "idle_s": 10.0} | limits))
    async with Transport() as transport:
        yield Rig(Relay(transport, balancer, {"penstock": FleetWorker(TOKEN)}, times), balancer, alive=alive)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made


async def read(exchange: Exchange) -> list[bytes]:
    """All events to the good end."""
    found: list[bytes] = []
    async with exchange:
        while not exchange.complete:
            found += await exchange.events()
    return found


async def read_until_fault(exchange: Exchange) -> tuple[list[bytes], BackendFault]:
    found: list[bytes] = []
    async with exchange:
        try:
            while not exchange.complete:
                found += await exchange.events()
        except BackendFault as fault:
            return found, fault
    raise AssertionError(f"no fault after {found}")


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


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


async def test_an_error_event_before_the_first_token_goes_to_the_next_backend(rig: Rig, upstream: Any) -> None:
    async def fails(c: Any) -> None:
        await c.begin()
        await c.event(b'{"error":{"message":"no memory","type":"server_error","code":"oom"}}')

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("Paris", 1)
        await c.done()

    bad, good = await upstream(fails), await upstream(answer)
    rig.use(bad.url, good.url)
    rig.balancer._turn = 1  # the next turn is the first endpoint's
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


async def test_content_that_speaks_of_errors_is_no_error(rig: Rig, upstream: Any) -> None:
    events = [token("error"), token('{"error": {"message": "x"}}'), token(None, error=None), b'["error"]', b'"error" {']

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


async def test_a_backend_that_never_answers_is_given_up(upstream: Any) -> None:
    async def silent(c: Any) -> None:
        await c.wait_closed_by_peer()

    server = await upstream(silent)
    async with rigged(first_byte_s=0.2) as rig:
        rig.use(server.url)
        _, fault = await read_until_fault(rig.open())
    assert fault.code == "backend_timeout"
    assert fault.error().status == 504
    await eventually(lambda: not server.failures)


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
        rig.use(first.url, second.url)
        rig.balancer._turn = 1
        exchange = rig.open()
        found, fault = await read_until_fault(exchange)
    assert len(found) == 1
    assert exchange.attempts == 2
    assert fault.code == "backend_timeout"


async def test_the_time_limit_of_the_route_ends_a_stream_that_is_still_alive(rig: Rig, upstream: Any) -> None:
    async def slow(c: Any) -> None:
        await c.begin()
        for number in range(1000):
            await c.token("a", number + 1)
            await asyncio.sleep(0.02)

    rig.use((await upstream(slow)).url)
    found, fault = await read_until_fault(rig.open(total_s=0.3))
    assert found
    assert fault.code == "request_timeout"


async def test_waiting_returns_empty_handed_and_loses_nothing(rig: Rig, upstream: Any) -> None:
    async def slow(c: Any) -> None:
        await c.begin()
        await asyncio.sleep(0.3)
        await c.token("late", 1)
        await c.done()

    rig.use((await upstream(slow)).url)
    async with rig.open() as exchange:
        waits = 0
        while not (found := await exchange.events(wait_s=0.05)):
            waits += 1
            assert not exchange.complete
    assert waits >= 2
    assert b"late" in found[0]


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


async def test_429_is_passed_on_with_its_retry_after_when_no_backend_is_left(rig: Rig, upstream: Any) -> None:
    body = b'{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":"queue_full"}}'

    async def busy(c: Any) -> None:
        await c.status(429, body, more="retry-after: 7\r\n")

    one, two = await upstream(busy), await upstream(busy)
    rig.use(one.url, two.url)
    exchange = rig.open()
    _, fault = await read_until_fault(exchange)
    assert exchange.attempts == 2
    error = fault.error()
    assert (error.status, error.encode(), error.headers) == (429, body, {"retry-after": "7"})
    assert fault.code == "queue_full"


async def test_a_bad_request_is_passed_on_as_it_is_and_not_repeated(rig: Rig, upstream: Any) -> None:
    body = b'{"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}'

    async def refuses(c: Any) -> None:
        await c.status(400, body)

    server = await upstream(refuses)
    rig.use(server.url, server.url)
    _, fault = await read_until_fault(rig.open())
    assert isinstance(fault, BackendError)
    assert (fault.error().status, fault.error().encode()) == (400, body)
    assert len(server.seen) == 1


async def test_a_retry_after_that_no_header_can_bear_is_left_out(rig: Rig, upstream: Any) -> None:
    async def busy(c: Any) -> None:
        await c.status(
            503, b'{"error":{"message":"busy","code":"engine_overloaded"}}', more="retry-after: sp\xe4ter\r\n"
        )

    rig.use((await upstream(busy)).url)
    _, fault = await read_until_fault(rig.open())
    assert (fault.error().status, fault.error().headers) == (503, {})


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_of_the_gateway_itself_is_not_shown_to_the_client(rig: Rig, upstream: Any, status: int) -> None:
    async def refuses(c: Any) -> None:
        await c.status(status, b'{"error":{"message":"bad fleet token","type":"authentication_error","code":"x"}}')

    server = await upstream(refuses)
    rig.use(server.url, server.url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502
    assert b"fleet" not in fault.error().encode()
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("status", "body", "media_type"),
    [
        (500, b"<html>nginx secret page</html>", "text/html"),
        (502, b"", "text/plain"),
        (400, b"<html>nginx secret page</html>", "text/html"),
        (418, b'{"detail":"nginx secret page"}', "application/json"),
        (302, b"nginx secret page", "text/plain"),
        (200, b"<html>nginx secret page</html>", "text/html"),
        (500, b"nginx secret page" * 10_000, "text/plain"),
    ],
)
async def test_pages_that_are_no_answer_become_a_clear_error(
    rig: Rig, upstream: Any, status: int, body: bytes, media_type: str
) -> None:
    async def page(c: Any) -> None:
        await c.status(status, body, media_type=media_type)

    rig.use((await upstream(page)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502
    told = json.loads(fault.error().encode())["error"]
    assert told["type"] == "server_error"
    assert "secret" not in told["message"]


async def test_garbage_instead_of_http_is_a_fault(rig: Rig, upstream: Any) -> None:
    async def garbage(c: Any) -> None:
        await c.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    rig.use((await upstream(garbage)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502


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
    rig.use(gone.url, good.url)
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


async def test_three_attempts_at_most(rig: Rig, upstream: Any) -> None:
    async def fails(c: Any) -> None:
        await c.status(500, b"")

    server = await upstream(fails)
    rig.use(*[server.url] * 5)
    exchange = rig.open()
    await read_until_fault(exchange)
    assert exchange.attempts == len(server.seen) == 3


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
    assert rig.balancer._in_flight == {}


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


async def test_requests_in_flight_are_counted_until_they_end(rig: Rig, upstream: Any) -> None:
    release = asyncio.Event()

    async def answer(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await release.wait()
        await c.done()

    rig.use((await upstream(answer)).url)
    reading: Awaitable[list[bytes]] = asyncio.ensure_future(read(rig.open()))
    await eventually(lambda: rig.balancer._in_flight == {"w0": 1})
    release.set()
    await reading
    assert rig.balancer._in_flight == {}
