"""Probes: a request that costs nothing, to endpoints of which there is no good news.

A declared backend is probed when no request succeeded there of late, or while its breaker is not closed. A worker's
heartbeats say that it lives, but not that we reach it: it is probed while its breaker is not closed, or while requests
are there of which none succeeded of late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from types import TracebackType

import structlog

from gateway.clock import Clock
from gateway.routing.policy import Balancer
from gateway.routing.route import Endpoint

EVERY_S = 10.0
DOUBTFUL_SHARE = 0.2
"""Of the interval, for one whose breaker is not closed."""
TIMEOUT_S = 2.0
AT_ONCE = 16
TURN_S = 0.25
JITTER = 0.2
_log = structlog.get_logger(__name__)

Probe = Callable[[Endpoint], Awaitable[bool]]
"""Whether an endpoint lives. It may raise, and may take for ever: it is given up."""


class Probes:
    """An async context manager: it probes meanwhile, and has the balancer forget endpoints that are gone.

    ``endpoints``: all that are alive or declared.
    """

    def __init__(
        self,
        endpoints: Callable[[], Iterable[Endpoint]],
        balancer: Balancer,
        probe: Probe,
        clock: Clock,
        *,
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
        turn_s: float = TURN_S,
        at_once: int = AT_ONCE,
        random: Random | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._balancer = balancer
        self._probe = probe
        self._clock = clock
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._turn_s = turn_s
        self._random = random or Random()
        self._last: dict[str, float] = {}
        """When each was probed last, or seen first."""
        self.under_way: set[str] = set()
        """Ids of those whose probe has not ended."""
        self._slots = asyncio.Semaphore(at_once)
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Probes:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._keep_probing(), name="probes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def turn(self) -> None:
        """Begin the probes that are due."""
        alive = list(self._endpoints())
        self._balancer.keep_only(alive)
        now = self._clock.monotonic()
        last, self._last = self._last, {}
        for endpoint in alive:
            # A new one has its first probe at any time within the interval, so that they spread; but not at once.
            waited = self._random.random() * self._every_s * (1 - JITTER)
            self._last[endpoint.id] = last.get(endpoint.id, now - waited)
            if endpoint.id not in self.under_way and self._due(endpoint, now):
                self._last[endpoint.id] = now
                self.under_way.add(endpoint.id)
                task = self._tasks.create_task(self._ask(endpoint), name=f"probe-{endpoint.id}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _due(self, endpoint: Endpoint, now: float) -> bool:
        doubtful = self._balancer.doubtful(endpoint)
        expects_news = endpoint.revision > 0 or self._balancer.in_flight_at(endpoint) > 0
        if not doubtful and not (expects_news and self._balancer.idle_s(endpoint) >= self._every_s):
            return False
        interval = self._every_s * (DOUBTFUL_SHARE if doubtful else 1.0) * self._random.uniform(1 - JITTER, 1)
        return now - self._last[endpoint.id] >= interval

    async def _ask(self, endpoint: Endpoint) -> None:
        try:
            async with self._slots:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        alive = await self._probe(endpoint)
                except Exception as fault:  # whatever it is, no sign of life came
                    _log.debug("a probe failed", backend=endpoint.id, reason=repr(fault))
                    alive = False
            self._balancer.probed(endpoint, alive=alive)
        finally:
            self.under_way.discard(endpoint.id)

    async def _keep_probing(self) -> None:
        while not self._closing.is_set():
            self.turn()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._turn_s):
                    await self._closing.wait()
