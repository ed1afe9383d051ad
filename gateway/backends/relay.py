"""One order, brought to a backend and its answer back: attempts, metering, the deadline.

Nothing here knows who pays, how the client is spoken to or how the backend speaks. A fault before anything of the
answer was handed on is tried again on another backend; afterwards it is raised, and the door says so in the client's
protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

from gateway.apis import Family
from gateway.backends import faults
from gateway.backends.attempt import Attempt
from gateway.backends.backend import Backend, Order, Outgoing, Reading
from gateway.backends.faults import BackendFault
from gateway.backends.time_limits import TimeLimits
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.long_work import is_short, worked
from gateway.observability.observer import Attempt as ObservedAttempt
from gateway.observability.observer import Observer
from gateway.routing.policy import Balancer, Choice
from gateway.routing.standing import InUse
from worker.protocol.errors import ApiError

MAX_ATTEMPTS = 6
"""Enough for two tiers of targets, see ``gateway.routing.policy.TRIES_A_TIER``."""
LEAST_RETRY_S = 0.05
"""With less left to the deadline no backend could answer any more."""

_NO_USAGE = TokenUsage()


class Relay:
    """Opens exchanges; one for the whole gateway."""

    def __init__(
        self, transport: Transport, balancer: Balancer, backends: Mapping[Family, Backend], limits: TimeLimits
    ) -> None:
        self.transport = transport
        self.balancer = balancer
        self.backends = backends
        self.limits = limits

    def open(
        self, order: Order, *, total_s: float, checkpoint: Callable[[TokenUsage, str], None], observer: Observer
    ) -> Exchange:
        """``checkpoint(usage, backend)`` is told running totals as they become known; it must be quick. ``observer``
        is told of each attempt.
        """
        self.balancer.began(order.model)
        return Exchange(self, order, total_s, checkpoint, observer)


class Exchange:
    """One order's way through its attempts. A context manager: leaving it closes what is open to the backend."""

    def __init__(
        self,
        relay: Relay,
        order: Order,
        total_s: float,
        checkpoint: Callable[[TokenUsage, str], None],
        observer: Observer,
    ) -> None:
        self._relay = relay
        self._order = order
        self._total_s = total_s
        self._checkpoint = checkpoint
        self._observer = observer
        self._observed: ObservedAttempt | None = None
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._deadline = self._started + total_s
        self._attempt: Attempt | None = None
        self._in_use: InUse | None = None
        """What counts the running attempt among its endpoint's."""
        self._next: tuple[Choice, Outgoing] | None = None
        self._model = ""
        """By which the backend of the latest attempt knows the model."""
        self._cannot: ApiError | None = None
        """Why a backend cannot be asked this."""
        self._tried: list[str] = []
        self._repeated = False
        self.attempts = 0
        self.backend_id: str | None = None
        """The backend of the latest attempt."""
        self.usage = _NO_USAGE
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
        try:
            if self.complete and self._attempt is not None:
                await self._attempt.finish()
        finally:
            await self._close_attempt()

    async def events(self, *, wait_s: float | None = None) -> list[bytes]:
        """Data of the events that came since the last call, at least one; ``[DONE]`` is not among them.

        Empty when ``wait_s`` seconds passed without, or when the answer is ``complete``.
        Raises BackendFault, also for an error event; ApiError for what no backend can be asked.
        """
        wait_until = self._deadline if wait_s is None else min(self._loop.time() + wait_s, self._deadline)
        while not self.complete:
            now = self._loop.time()
            if now >= self._deadline:
                raise self._out_of_time()
            if now >= wait_until:
                return []
            attempt = self._attempt or await self._begin()
            last = wait_until >= self._deadline
            try:
                reading = await attempt.pull(wait_until, last=last)
                if reading is not None:
                    self._take(attempt, reading)
            except BackendFault as fault:
                await self._give_up(attempt, fault)
                continue
            if reading is None:
                if last:
                    raise self._out_of_time()
                return []
            if reading.events:
                if not self.handed_on:
                    self.handed_on = True
                    self._relay.balancer.answering(attempt.endpoint)
                if self.first_token_ms is None and (self.usage.completion_tokens or self.usage.source != "backend"):
                    self.first_token_ms = self.elapsed_ms()
                return reading.events
        return []

    def elapsed_ms(self) -> int:
        return round((self._loop.time() - self._started) * 1000)

    def _take(self, attempt: Attempt, reading: Reading) -> None:
        """Raises the reading's fault, if nothing came before it that is to be handed on first."""
        if reading.usage is not None:
            self.usage = reading.usage
            self._checkpoint(reading.usage, attempt.endpoint.id)
        if reading.fault is not None:
            if not reading.events:
                raise reading.fault
        elif reading.complete:
            self.complete = True
            self._relay.balancer.succeeded(attempt.endpoint)

    async def _begin(self) -> Attempt:
        """Raises BackendFault if there is no backend, ApiError if none can be asked this."""
        relay, order = self._relay, self._order
        found, self._next = self._next or await self._find(), None
        if found is None:
            wait_s = relay.balancer.wait_s(order.targets, order.api, context_length=order.context_length)
            raise self._cannot or faults.no_backend(order.model, wait_s)
        choice, outgoing = found
        endpoint = choice.endpoint
        self._tried.append(endpoint.id)
        self.attempts += 1
        self.backend_id = endpoint.id
        if self.usage is not _NO_USAGE and self.usage != _NO_USAGE:
            self.wasted.append(self.usage)
        self.usage = _NO_USAGE
        self.queue_ms = self.elapsed_ms()
        self._model = choice.model
        self._in_use = relay.balancer.using(endpoint)
        self._in_use.begin()
        self._observed = self._observer.attempt(
            order.api,
            choice.model,
            endpoint.id,
            endpoint.brand,
            endpoint.base_url,
            max_tokens=order.output_cap,
            stream=order.streamed,
        )
        if self._observed.traceparent is not None:
            outgoing.headers["traceparent"] = self._observed.traceparent
        limits, backend = relay.limits.of(endpoint), relay.backends[endpoint.family]
        self._attempt = Attempt(relay.transport, backend, order, endpoint, outgoing, limits)
        return self._attempt

    async def _find(self) -> tuple[Choice, Outgoing] | None:
        """The best backend that was not tried yet and can be asked this."""
        order, relay = self._order, self._relay
        while True:
            choice = relay.balancer.choose(
                order.targets, order.api, context_length=order.context_length, tried=self._tried
            )
            if choice is None:
                return None
            endpoint = choice.endpoint
            try:
                backend = relay.backends[endpoint.family]
                if is_short(order.prompt_bytes):
                    return choice, backend.outgoing(order, endpoint, choice.model)
                write = partial(backend.outgoing, order, endpoint, choice.model)
                return choice, await worked(order.prompt_bytes, write)
            except ApiError as error:
                # Another family may have words for it.
                self._cannot = error
                self._tried.append(endpoint.id)

    async def _give_up(self, attempt: Attempt, fault: BackendFault) -> None:
        """Close the attempt; return if another one is to be made, else raise ``fault``."""
        self._note(attempt, fault)
        # A connection that idled may have been closed by the peer just as it was used: no mark against the backend.
        is_chance = fault.lost_early and not self._repeated
        if not is_chance:
            self._tell(attempt, fault, unhealthy=fault.unhealthy)
        await self._close_attempt()
        left_s = self._deadline - self._loop.time()
        if self.handed_on or not fault.retryable or self.attempts >= MAX_ATTEMPTS or left_s < LEAST_RETRY_S:
            raise fault
        if is_chance:
            self._repeated = True
            self._tried.remove(attempt.endpoint.id)
            return
        self._next = await self._find()
        if self._next is None or not self._relay.balancer.may_retry(self._order.model):
            raise fault

    def _out_of_time(self) -> BackendFault:
        fault = faults.out_of_time(self._total_s)
        attempt = self._attempt
        if attempt is not None:
            self._note(attempt, fault)
            # One that said nothing is to blame if it had most of the time; else nothing was learned of it.
            if attempt.answering or attempt.age_s() >= self._total_s / 2:
                self._tell(attempt, fault, unhealthy=not attempt.answering)
        return fault

    def _note(self, attempt: Attempt, fault: BackendFault) -> None:
        self.failed_attempts.append(f"{attempt.endpoint.id} {fault.code}")
        if self._observed is not None:
            self._observed.end(fault.outcome, self.usage)

    def _tell(self, attempt: Attempt, fault: BackendFault, *, unhealthy: bool) -> None:
        self._relay.balancer.failed(
            attempt.endpoint,
            unhealthy=unhealthy,
            unreachable=fault.unreachable,
            busy=fault.busy,
            unknown_model=self._model if fault.unknown_model else None,
            retry_after_s=fault.retry_after_s,
            code=fault.code,
        )

    async def _close_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if self._observed is not None:
            self._observed.end(None, self.usage)
        in_use, self._in_use = self._in_use, None
        try:
            if attempt is not None:
                await attempt.close()
        finally:
            if in_use is not None:
                in_use.end()
