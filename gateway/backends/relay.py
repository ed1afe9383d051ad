"""One order, brought to a backend and its answer back: attempts, event framing, metering, time limits.

Nothing here knows who pays or how the client is spoken to. A fault before anything of the answer was handed on is
tried again on another backend; afterwards it is raised, and the door says so in the client's protocol.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from gateway.backends import faults
from gateway.backends.backend import Backend, Order
from gateway.backends.faults import BackendError, BackendFault
from gateway.backends.transport import Reply, Transport
from gateway.billing.normalise import openai_usage
from gateway.billing.usage import TokenUsage
from gateway.routing.policy import Balancer
from gateway.routing.route import Endpoint
from worker.protocol.sse import DONE, MEDIA_TYPE, Comment, Event, EventTooLarge, Framer

MAX_ATTEMPTS = 3
ERROR_BODY_LIMIT = 64 * 1024
EVENT_LIMIT = 16 * 1024 * 1024
ESTIMATED_BYTES_PER_TOKEN = 4
_NOT_FOR_THE_CLIENT = frozenset({401, 403, 404, 405, 407, 408})
"""Refusals that say something about gateway and worker, not about the request."""
_WORTH_ANOTHER_TRY = frozenset({408, 429})
_PASSING = frozenset({"engine_overloaded", "worker_stopping"})
"""Codes of error events that a repetition in a moment may well not meet again: for the client a 503."""
_RETRY_AFTER = re.compile(r"[\x20-\x7e]{1,64}")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds. ``first_byte_s`` also bounds the silence before the first event."""

    first_byte_s: float
    idle_s: float


class Relay:
    """Opens exchanges; one for the whole gateway."""

    def __init__(self, transport: Transport, balancer: Balancer, backend: Backend, limits: TimeLimits) -> None:
        self.transport = transport
        self.balancer = balancer
        self.backend = backend
        self.limits = limits

    def open(self, order: Order, *, total_s: float, checkpoint: Callable[[TokenUsage, str], None]) -> Exchange:
        """``checkpoint(usage, backend)`` is told running totals as they become known; it must be quick."""
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
                found = await attempt.pull(min(wait_until, self._deadline))
            except BackendFault as fault:
                self._abandon_attempt(fault)
                continue
            if found is None:
                if self._loop.time() >= self._deadline:
                    raise faults.out_of_time(self._total_s)
                return []
            if found:
                self.handed_on = True
                if self.first_token_ms is None and (self.usage.completion_tokens or self.usage.source != "backend"):
                    self.first_token_ms = self.elapsed_ms()
                return found
        return []

    def elapsed_ms(self) -> int:
        return round((self._loop.time() - self._started) * 1000)

    def seen(self, usage: TokenUsage) -> None:
        """Take running totals; the last ones count."""
        self.usage = usage
        if self.backend_id is not None:
            self._checkpoint(usage, self.backend_id)

    async def _begin(self) -> _Attempt:
        """Reach a backend that begins to answer. Raises BackendFault."""
        relay, order = self._relay, self._order
        endpoint = self._choose()
        if endpoint is None:
            raise faults.no_backend(order.model)
        self._tried.append(endpoint.id)
        self.attempts += 1
        self.backend_id = endpoint.id
        if self.usage != TokenUsage():
            self.wasted.append(self.usage)
        self.usage = TokenUsage()
        with ExitStack() as in_use:
            in_use.enter_context(relay.balancer.using(endpoint))
            limit = min(self._loop.time() + relay.limits.first_byte_s, self._deadline)
            self.queue_ms = self.elapsed_ms()
            try:
                async with asyncio.timeout_at(limit):
                    reply = await relay.transport.post(
                        relay.backend.url(endpoint), headers=relay.backend.headers(order), body=order.body
                    )
                    in_use.callback(reply.close)
                    if reply.status != 200:
                        raise await _refusal(reply)
            except TimeoutError as fault:
                raise self._too_slow(relay.limits.first_byte_s) from fault
            except BackendFault as fault:
                if fault.unreachable:
                    relay.balancer.set_aside(endpoint)
                raise
            if reply.media_type != MEDIA_TYPE:
                raise faults.malformed("answered with something that is not an event stream")
            self._attempt = _Attempt(self, relay, order, endpoint, reply, in_use.pop_all())
            return self._attempt

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
        elif self._choose() is None:
            raise fault

    def _choose(self) -> Endpoint | None:
        order = self._order
        return self._relay.balancer.choose(order.pool, context_length=order.context_length, tried=self._tried)


class _Attempt:
    """A backend's event stream."""

    def __init__(
        self, exchange: Exchange, relay: Relay, order: Order, endpoint: Endpoint, reply: Reply, held: ExitStack
    ) -> None:
        self.reply = reply
        self._exchange = exchange
        self._order = order
        self._backend = relay.backend
        self._limits = relay.limits
        self._held = held
        self._framer = Framer(limit=EVENT_LIMIT)
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._heard_anything = False
        self._metered = False
        self._told = False
        """Whether the backend told usage, by meter or otherwise. Until it has, tokens are estimated."""
        self._reported = TokenUsage()
        self._counted = 0
        self._rename = order.model != order.backend_model
        self._left_over: BackendFault | None = None

    def close(self) -> None:
        self._held.close()

    async def pull(self, until: float) -> list[bytes] | None:
        """Data of the events of one read, perhaps none; None when ``until`` (loop time) passed. Raises BackendFault."""
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
        try:
            items = self._framer.feed(chunk) if chunk else self._framer.flush()
        except EventTooLarge as fault:
            raise faults.malformed("sent an event that is too long") from fault
        found = self._take(items)
        if not chunk and not self._exchange.complete and self._left_over is None:
            self._left_over = faults.disconnected()
        if self._left_over is not None and not found:
            raise self._left_over
        return found

    def _take(self, items: list[Event | Comment]) -> list[bytes]:
        exchange = self._exchange
        found: list[bytes] = []
        usage: TokenUsage | None = None
        for item in items:
            if isinstance(item, Comment):
                reading = self._backend.reading(item.text)
                if reading is not None:
                    usage = reading
                    self._metered = self._told = True
                continue
            data = item.data
            if data == DONE:
                if found or exchange.handed_on:
                    exchange.complete = True
                else:
                    self._left_over = faults.malformed("ended its answer before it began")
                break
            # Cheap tests on the bytes first: a JSON key stands there unescaped, so what they miss is not there.
            if b'"error"' in data or item.event == b"error":
                error = _error_event(data)
                if error is not None or item.event == b"error":
                    self._left_over = error or faults.malformed("sent an error event that is not JSON")
                    break
            if b'"usage"' in data and b'"usage":null' not in data:
                unwanted = self._order.streamed and not self._order.include_usage
                # Where a meter tells usage, what the event says of it only matters if the event may have to go.
                told = _usage_of(data, self._reported) if unwanted or not self._metered else None
                if told is not None and not self._metered:
                    usage = self._reported = told
                    self._told = True
                if told is not None and unwanted and _has_no_choice(data):
                    continue
            if not self._told:
                self._counted += 1 if self._order.streamed else -(-len(data) // ESTIMATED_BYTES_PER_TOKEN)
            found.append(_renamed(data, self._order.model) if self._rename else data)
        if self._counted and not self._told:
            usage = self._estimated()
        if usage is not None:
            exchange.seen(usage)
        return found

    def _estimated(self) -> TokenUsage:
        """Events are counted for tokens, and some have none: so never more than what was reserved for."""
        order, completion = self._order, self._counted
        prompt = order.prompt_tokens
        if prompt is None:
            prompt = min(-(-order.prompt_bytes // ESTIMATED_BYTES_PER_TOKEN), order.context_length)
        if order.output_tokens is not None:
            completion = min(completion, order.output_tokens)
        return TokenUsage(prompt, completion, source="estimated")


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _usage_of(data: bytes, before: TokenUsage) -> TokenUsage | None:
    """Running totals, after those told ``before``, if the event tells any."""
    event = _decoded(data)
    reported = event.get("usage") if isinstance(event, dict) else None
    usage = openai_usage(reported, before)
    return None if usage is before else usage


def _has_no_choice(data: bytes) -> bool:
    event = _decoded(data)
    return isinstance(event, dict) and event.get("choices") == []


def _renamed(data: bytes, model: str) -> bytes:
    event = _decoded(data)
    if not isinstance(event, dict) or "model" not in event:
        return data
    event["model"] = model
    return msgspec.json.encode(event)


def _error_code(error: dict[str, Any]) -> str | None:
    code = error.get("code")
    if isinstance(code, str) and code:
        return code[:64]
    kind = error.get("type")
    return kind[:64] if isinstance(kind, str) and kind else None


def _error_event(data: bytes) -> BackendError | None:
    """The fault that an event tells, if it tells one. An integer ``code`` is an HTTP status, as some servers use it."""
    event = _decoded(data)
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    if type(code) is int and 400 <= code < 600:
        status = code
    else:
        status = 503 if isinstance(code, str) and code in _PASSING else 502
    client_fault = status < 500 and status not in _WORTH_ANOTHER_TRY
    return BackendError(
        status,
        msgspec.json.encode({"error": error}),
        code=_error_code(error) or "backend_error",
        retryable=not client_fault,
        retry_after="1" if status == 503 else None,
    )


async def _refusal(reply: Reply) -> BackendFault:
    """What an answer with a status other than 200 means."""
    status = reply.status
    body = await reply.read_limited(ERROR_BODY_LIMIT)
    told = _decoded(body) if body else None
    error = told.get("error") if isinstance(told, dict) else None
    retryable = status >= 500 or status in _WORTH_ANOTHER_TRY
    shown = (400 <= status < 500 and status not in _NOT_FOR_THE_CLIENT) or status == 503
    retry_after = reply.header("retry-after")
    if retry_after is not None and not _RETRY_AFTER.fullmatch(retry_after):
        retry_after = None
    if shown and body is not None and isinstance(error, dict) and isinstance(error.get("message"), str):
        return BackendError(
            status,
            body,
            code=_error_code(error) or "backend_error",
            retryable=retryable,
            retry_after=retry_after,
        )
    if status == 429 or status == 503:
        return BackendFault("engine_overloaded", "The workers are busy. Try again shortly.", status=503)
    return BackendFault(
        "backend_error",
        f"The worker failed with status {status}. Send the request again; if it persists, tell the operator.",
        retryable=retryable,
    )
