"""Routes for those who run a worker, beside those who ask it: metrics, sleep, the prefix cache and its events."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import structlog
from litestar import Request, Response, Router, get, post
from litestar.types import ControllerRouterHandler, Receive, Scope, Send

from worker.engine.client import ControlRefused, EngineClient, EngineDead
from worker.protocol.errors import ApiError, bad_request, server_error
from worker.protocol.sse import MEDIA_TYPE, encode_comment
from worker.server.door import Door
from worker.server.kv_event_stream import FellBehind, Follower, KVEventStream
from worker.server.metrics import Metrics
from worker.server.service import engine_fault

_KEEPALIVE_S: Final = 10.0
_KEEPALIVE: Final = encode_comment(b"keep-alive")
_STALL_S: Final = 30.0
"""How long a reader of events may leave the connection full before it is cut."""

log = structlog.get_logger("penstock.worker")


class Sleeping(msgspec.Struct, frozen=True):
    """``level``: 0 awake, 1 weights on the host, 2 weights dropped."""

    is_sleeping: bool
    level: int


class CacheReset(msgspec.Struct, frozen=True):
    reset: bool = True


def control_routes(
    engine: EngineClient, door: Door, metrics: Metrics, events: KVEventStream | None
) -> list[ControllerRouterHandler]:
    """Route handlers for the worker's application, at its root.

    ``/metrics`` is guarded as ``/v1`` is. The others need the fleet token wherever there is one: they disturb
    everybody, and events carry prompts. ``events``: None if the engine tells none.
    """

    @get("/metrics", sync_to_thread=False, guards=[door.guard])
    def scrape() -> Response[bytes]:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    @post("/sleep", status_code=200)
    async def sleep(request: Request[Any, Any, Any]) -> Sleeping:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise bad_request("'level' must be 1 (weights to the host) or 2 (weights dropped).", param="level")
        try:
            await engine.sleep(int(level))
        except (ControlRefused, EngineDead) as fault:
            raise _refused(fault) from fault
        return sleeping()

    @post("/wake_up", status_code=200)
    async def wake_up() -> Sleeping:
        try:
            await engine.ensure_awake()
        except ControlRefused as fault:
            raise engine_fault(fault) from fault
        except EngineDead as fault:
            raise _refused(fault) from fault
        return sleeping()

    @get("/is_sleeping", sync_to_thread=False)
    def is_sleeping() -> Sleeping:
        return sleeping()

    def sleeping() -> Sleeping:
        return Sleeping(engine.sleep_level > 0, engine.sleep_level)

    @post("/reset_prefix_cache", status_code=200)
    async def reset_prefix_cache() -> CacheReset:
        try:
            await engine.reset_cache()
        except (ControlRefused, EngineDead) as fault:
            raise _refused(fault) from fault
        return CacheReset()

    @get("/kv/events", sync_to_thread=False)
    def kv_events(request: Request[Any, Any, Any]) -> EventResponder:
        if events is None:
            raise ApiError(404, "This worker tells no KV events. Start it with --kv-events.", code="kv_events_disabled")
        return EventResponder(events.follow(_position(request)))

    guarded = Router(
        "/", guards=[door.guard_fleet], route_handlers=[sleep, wake_up, is_sleeping, reset_prefix_cache, kv_events]
    )
    return [scrape, guarded]


def _refused(fault: ControlRefused | EngineDead) -> ApiError:
    if isinstance(fault, ControlRefused):
        return ApiError(409, str(fault), code="engine_busy")
    return server_error("The worker's engine is gone.", status=503, code="engine_dead")


def _position(request: Request[Any, Any, Any]) -> int | None:
    """Behind which event to begin: what a browser sends when it comes back goes before ``from``. Raises ApiError."""
    seen = request.headers.get("last-event-id", "")
    if seen:
        return _number(seen, "Last-Event-ID")
    wanted = request.query_params.get("from")
    return None if wanted is None else _number(wanted, "from") - 1


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise bad_request(f"{name!r} must be the number of an event, as its 'id' told it.", param=name)
    return int(text)


class EventResponder:
    """An ASGI application that sends one follower's events, until either side leaves or the follower falls behind."""

    def __init__(self, follower: Follower, *, keepalive_s: float = _KEEPALIVE_S, stall_s: float = _STALL_S) -> None:
        self._follower = follower
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_events(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send_events(self, send: Send) -> None:
        head = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await self._write(send, _KEEPALIVE)  # the head leaves now, though there be no event for long
        try:
            while True:
                try:
                    async with asyncio.timeout(self._keepalive_s):
                        frames = await self._follower.next()
                except TimeoutError:
                    frames = _KEEPALIVE
                if not frames:
                    break
                await self._write(send, frames)
        except FellBehind:
            log.warning("a reader of KV events fell behind and was cut")
        except TimeoutError:
            log.warning("a reader of KV events stopped reading and was cut")
            return  # to end it properly would wait for the reader, too: the server closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, frames: bytes) -> None:
        async with asyncio.timeout(self._stall_s):
            await send({"type": "http.response.body", "body": frames, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
