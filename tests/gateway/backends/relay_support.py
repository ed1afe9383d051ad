"""A relay before scripted backends, and ways to read what comes through it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.backends.backend import Order
from gateway.backends.families import create_backends
from gateway.backends.faults import BackendFault
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.relay import Exchange, Relay
from gateway.backends.time_limits import TimeLimits
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.observability.metrics import Metrics
from gateway.observability.observer import Observer
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

    def use(self, *urls: str, in_turn: bool = False, **more: Any) -> None:
        """``in_turn``: the first one first, as long as it is usable. ``more``: fields of each endpoint."""
        self.alive[:] = [
            Endpoint(f"w{number}", "pool", url, "m", 1000, priority=number if in_turn else 0, **more)
            for number, url in enumerate(urls)
        ]

    def in_flight(self) -> dict[str, int]:
        return self.balancer.in_flight()

    def open(self, *, total_s: float = 20.0, observer: Observer | None = None, **changes: Any) -> Exchange:
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
            order,
            total_s=total_s,
            checkpoint=lambda usage, id: self.checkpoints.append((usage, id)),
            observer=observer or Observer(Metrics(), None),
        )


@asynccontextmanager
async def rigged(**limits: float) -> AsyncIterator[Rig]:
    alive: list[Endpoint] = []
    balancer = Balancer(lambda pool: alive if pool == "pool" else [], SystemClock())
    times = TimeLimits(**({"connect_s": 2.0, "first_byte_s": 10.0, "idle_s": 10.0} | limits))
    async with Transport() as transport:
        backends = create_backends(FleetWorker(TOKEN), SystemClock())
        yield Rig(Relay(transport, balancer, backends, times), balancer, alive=alive)


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


@asynccontextmanager
async def black_hole() -> AsyncIterator[str]:
    """URL of a server whose connections never come about: its queue of them is full."""
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = open_sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
