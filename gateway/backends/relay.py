"""One order, brought to a backend and its answer back: attempts, metering, time limits.

Nothing here knows who pays, how the client is spoken to or how the backend speaks. A fault before anything of the
answer was handed on is tried again on another backend; afterwards it is raised, and the door says so in the client's
protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from gateway.apis import Family
from gateway.backends import faults
from gateway.backends.backend import Backend, Order, Reader, Reading
from gateway.backends.faults import BackendFault
from gateway.backends.transport import Reply, Transport
from gateway.billing.usage import TokenUsage
from gateway.routing.policy import Balancer, Choice
from gateway.routing.route import Endpoint

MAX_ATTEMPTS = 3
ERROR_BODY_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds. ``first_byte_s`` also bounds the silence before the first event."""

    connect_s: float
    first_byte_s: float
    idle_s: float

    def of(self, endpoint: Endpoint) -> TimeLimits:
        """These, but for what ``endpoint`` has of its own."""
        if endpoint.connect_timeout_s is endpoint.first_byte_timeout_s is endpoint.idle_timeout_s is None:
            return self
        return TimeLimits(
            self.connect_s if endpoint.connect_timeout_s is None else endpoint.connect_timeout_s,
            self.first_byte_s if endpoint.first_byte_timeout_s is None else endpoint.first_byte_timeout_s,
            self.idle_s if endpoint.idle_timeout_s is None else endpoint.idle_timeout_s,
        )


class Relay:
    """Opens exchanges; one for the whole gateway."""

    def __init__(
        self, transport: Transport, balancer: Balancer, backends: Mapping[Family, Backend], limits: TimeLimits
    ) -> None:
        self.transport = transport
        self.balancer = balancer
        self.backends = backends
        self.limits = limits

    def open(self, order: Order, *, total_s: float, checkpoint: Callable[[TokenUsage, str], None]) -> Exchange:
        """``checkpoint(usage, backend)`` is told running totals as they become known; it must be quick."""
        self.balancer.began()
        return Exchange(self, order, total_s, checkpoint)


class Exchange:
    """One order's way through its attempts. A context manager: leaving it closes what is open to the backend."""

    def __init__(
        self, relay: Relay, order: Order, total_s: float, checkpoint: Callable[[TokenUsage, str], None]
    ) -> None:
        self._relay = relay
        self._order = order
        self._total_s = total_s
        self._checkpoint = checkpoint
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._deadline = self._started + total_s
        self._attempt: _Attempt | None = None
        self._tried: list[str] = []
        self._repeated = False
        self.attempts = 0
        self.backend_id: str | None = None
        """The backend of the latest attempt."""
        self.usage = TokenUsage()
        self.wasted: list[TokenUsage] = []
        """What attempts that failed had used, before the latest one."""
        self.failed_attempts: list[str] = []
        """Backend and error code of each, with a space between."""
        self.handed_on = False
        """Whether any event of the answer was returned; from then on there is no second attempt."""
        self.queue_ms: int | None = None
        """From the beginning until the request was sent in the latest attempt."""
        self.first_token_ms: int | None = None
        self.complete = False

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        try:
            if self.complete:
                await attempt.reply.finish()
        finally:
            attempt.close()

    async def events(self, *, wait_s: float | None = None) -> list[bytes]:
        """Data of the events that came since the last call, at least one; ``[DONE]`` is not among them.

        Empty when ``wait_s`` seconds passed in silence, or when the answer is ``complete``.
        Raises BackendFault, also for an error event.
        """
        wait_until = self._deadline if wait_s is None else self._loop.time() + wait_s
        while not self.complete:
            try:
                attempt = self._attempt or await self._begin()
                try:
                    reading = await attempt.pull(min(wait_until, self._deadline))
                except BackendFault as fault:
                    raise self._failed(attempt.endpoint, fault) from fault.__cause__
                if reading is not None:
                    self._take(attempt, reading)
            except BackendFault as fault:
                self._abandon_attempt(fault)
                continue
            if reading is None:
                if self._loop.time() >= self._deadline:
                    raise faults.out_of_time(self._total_s)
                return []
            found = reading.events
            if found:
                self.handed_on = True
                if self.first_token_ms is None and (self.usage.completion_tokens or self.usage.source != "backend"):
                    self.first_token_ms = self.elapsed_ms()
                return found
        return []

    def elapsed_ms(self) -> int:
        return round((self._loop.time() - self._started) * 1000)

    def _take(self, attempt: _Attempt, reading: Reading) -> None:
        """Raises the reading's fault, if nothing came before it that is to be handed on first."""
        if reading.usage is not None:
            self.usage = reading.usage
            self._checkpoint(reading.usage, attempt.endpoint.id)
        if reading.fault is not None:
            if not reading.events:
                raise self._failed(attempt.endpoint, reading.fault)
        elif reading.complete:
            self.complete = True
            self._relay.balancer.succeeded(attempt.endpoint)

    async def _begin(self) -> _Attempt:
        """Reach a backend that begins to answer. Raises BackendFault, ApiError for what no backend can be asked."""
        relay, order = self._relay, self._order
        choice = self._choose()
        if choice is None:
            raise faults.no_backend(order.model)
        endpoint = choice.endpoint
        backend = relay.backends[endpoint.family]
        outgoing = backend.outgoing(order, endpoint, choice.model)
        self._tried.append(endpoint.id)
        self.attempts += 1
        self.backend_id = endpoint.id
        if self.usage != TokenUsage():
            self.wasted.append(self.usage)
        self.usage = TokenUsage()
        limits = relay.limits.of(endpoint)
        with ExitStack() as in_use:
            in_use.enter_context(relay.balancer.using(endpoint))
            limit = min(self._loop.time() + limits.first_byte_s, self._deadline)
            self.queue_ms = self.elapsed_ms()
            try:
                async with asyncio.timeout_at(limit):
                    reply = await relay.transport.post(
                        outgoing.url, headers=outgoing.headers, body=outgoing.body, connect_s=limits.connect_s
                    )
                    in_use.callback(reply.close)
                    if reply.status != 200:
                        body = await reply.read_limited(ERROR_BODY_LIMIT)
                        raise backend.refusal(endpoint, reply.status, body, reply.header("retry-after"))
                    reader = backend.reader(order, endpoint, reply.media_type)
            except TimeoutError as fault:
                raise self._failed(endpoint, self._too_slow(limits.first_byte_s)) from fault
            except BackendFault as fault:
                raise self._failed(endpoint, fault) from None
            self._attempt = _Attempt(endpoint, limits, reply, reader, in_use.pop_all())
            return self._attempt

    def _failed(self, endpoint: Endpoint, fault: BackendFault) -> BackendFault:
        self.failed_attempts.append(f"{endpoint.id} {fault.code}")
        if not (fault.lost_early and not self._repeated):
            self._relay.balancer.failed(
                endpoint,
                unhealthy=fault.unhealthy,
                unreachable=fault.unreachable,
                retry_after_s=fault.retry_after_s,
            )
        return fault

    def _too_slow(self, seconds: float) -> BackendFault:
        return faults.out_of_time(self._total_s) if self._loop.time() >= self._deadline else faults.silent(seconds)

    def _abandon_attempt(self, fault: BackendFault) -> None:
        """Close the attempt; return if another one makes sense, else raise ``fault``."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()
        if self.handed_on or not fault.retryable or self.attempts >= MAX_ATTEMPTS:
            raise fault
        if fault.lost_early and not self._repeated:
            # A connection that idled may have been closed by the peer just as it was used: no mark against the backend.
            self._repeated = True
            self._tried.pop()
        elif not self._relay.balancer.may_retry() or self._choose() is None:
            raise fault

    def _choose(self) -> Choice | None:
        order = self._order
        return self._relay.balancer.choose(
            order.targets, order.api, context_length=order.context_length, tried=self._tried
        )


class _Attempt:
    """A backend's answer, as it comes."""

    def __init__(self, endpoint: Endpoint, limits: TimeLimits, reply: Reply, reader: Reader, held: ExitStack) -> None:
        self.endpoint = endpoint
        self.reply = reply
        self._limits = limits
        self._reader = reader
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._heard_anything = False
        self._left_over: BackendFault | None = None

    def close(self) -> None:
        self._held.close()

    async def pull(self, until: float) -> Reading | None:
        """What one read came to; None when ``until`` (loop time) passed. Raises BackendFault."""
        if self._left_over is not None:
            raise self._left_over
        silence_s = self._limits.idle_s if self._heard_anything else self._limits.first_byte_s
        limit = min(until, self._heard + silence_s)
        try:
            async with asyncio.timeout_at(limit):
                chunk = await self.reply.read_some()
        except TimeoutError as fault:
            if self._loop.time() >= self._heard + silence_s:
                raise faults.silent(silence_s) from fault
            return None
        self._heard = self._loop.time()
        self._heard_anything = True
        reading = self._reader.feed(chunk) if chunk else self._reader.end()
        self._left_over = reading.fault
        return reading
