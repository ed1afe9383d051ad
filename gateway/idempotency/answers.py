"""Answers of requests with an idempotency key: the one that runs and is shared, and those that replay it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol
from uuid import UUID

import structlog

from gateway.admission.redis import RedisUnavailable
from gateway.admission.ticket import Ticket
from gateway.answerable import Answerable
from gateway.billing.usage import Status, TokenUsage, UsageEvent, usd_text
from gateway.idempotency.reading import Reading, Unreadable
from gateway.idempotency.scope import Scope
from gateway.idempotency.share import Share
from gateway.idempotency.store import Lost
from gateway.observability.observer import Observer
from worker.protocol.errors import ApiError, overloaded, server_error

REPLAYED = "idempotent-replayed"
ORIGINAL = "x-penstock-original-request-id"

_log = structlog.get_logger("gateway.request")


class Recording(Protocol):
    """What a replay leaves behind beside its row; see ``gateway.recording``."""

    def feed(self, events: list[bytes]) -> None: ...
    def whole(self, body: bytes) -> None: ...
    def ended(self, event: UsageEvent, usage: None) -> None: ...


def _no_recording(_ticket: Ticket) -> Recording | None:
    return None


@dataclass(frozen=True, slots=True)
class Request:
    """One request with an idempotency key, as the pipeline knows it."""

    id: UUID
    streamed: bool
    timeout_s: float
    """The route's limit for the whole answer."""
    keepalive_s: float
    execute: Callable[[], Awaitable[Answerable]]
    """Admit it and send it to a backend. Raises ApiError."""
    admit_replay: Callable[[], Awaitable[Ticket]]
    """Admit it as a replay, which reserves nothing and is charged nothing. Raises ApiError."""
    observer: Observer
    patience_s: float | None = None
    """How long Redis may take to say who runs; None: as long as its client lets it."""
    record: Callable[[Ticket], Recording | None] = _no_recording
    """Called with the ticket of an admitted replay."""


class Room(Protocol):
    async def claim(self, scope: Scope, request_id: UUID) -> Share | Reading: ...
    async def own(self, share: Share, execute: Callable[[], Awaitable[Answerable]]) -> Owned: ...
    def wait(self, scope: Scope, count: int) -> None: ...


class Owned:
    """The answer of the request that runs. If it does not become complete, its entry is dropped."""

    def __init__(self, answer: Answerable, share: Share) -> None:
        self._answer = answer
        self._share = share

    @property
    def streamed(self) -> bool:
        return self._answer.streamed

    @property
    def timeout_s(self) -> float:
        return self._answer.timeout_s

    @property
    def complete(self) -> bool:
        return self._answer.complete

    @property
    def client_left(self) -> bool:
        return self._answer.client_left

    def left(self) -> None:
        self._answer.left()

    def headers(self) -> list[tuple[str, str]]:
        return self._answer.headers()

    async def events(self) -> list[bytes]:
        found = await self._answer.events()
        self._share.put(found)
        if self._answer.complete:
            self._share.finish()
        return found

    async def whole(self) -> bytes:
        body = await self._answer.whole()
        self._share.put([body])
        self._share.finish()
        return body

    async def __aenter__(self) -> Owned:
        await self._answer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._share.drop()
        await self._answer.__aexit__(kind, fault, trace)


class Replay:
    """The answer of a request that another one with its key came before.

    It is admitted when there is something to be replayed: until then it may yet become the one that runs, because the
    owner died or gave up. Once any of an owner's answer was handed on, that owner's end is this one's too.
    """

    def __init__(self, room: Room, scope: Scope, request: Request, reading: Reading) -> None:
        self._room = room
        self._scope = scope
        self._request = request
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + request.timeout_s
        self._own: Owned | None = None
        self._ticket: Ticket | None = None
        self._recording: Recording | None = None
        self._settled = False
        self._waiting = False
        self.client_left = False

    @property
    def streamed(self) -> bool:
        return self._request.streamed

    @property
    def timeout_s(self) -> float:
        """The route's limit twice: for waiting, and for running itself after all."""
        return 2 * self._request.timeout_s

    @property
    def complete(self) -> bool:
        return self._own.complete if self._own is not None else self._reading.complete

    def left(self) -> None:
        self.client_left = True
        if self._own is not None:
            self._own.left()

    def headers(self) -> list[tuple[str, str]]:
        """Nothing tells of a replay before it is one: a stream may be kept alive before that."""
        if self._own is not None:
            return self._own.headers()
        if self._ticket is None:
            return []
        headers = [*self._ticket.headers.items(), (REPLAYED, "true"), (ORIGINAL, str(self._reading.owner))]
        if not self.streamed:
            headers.append(("x-penstock-cost-usd", usd_text(0)))
        return headers

    async def events(self) -> list[bytes]:
        """Raises ApiError."""
        until = self._loop.time() + self._request.keepalive_s
        while self._own is None:
            found = await self._read(until)
            if found or (self._own is None and self._reading.complete):
                await self._admit()
                if self._recording is not None:
                    self._recording.feed(found)
                if self._reading.complete:
                    self._settle("replayed")
                return found
            if self._own is None and self._loop.time() >= until:
                return []
        return await self._own.events()

    async def whole(self) -> bytes:
        """Raises ApiError."""
        found: list[bytes] = []
        while self._own is None and not self._reading.complete:
            reading = self._reading
            news = await self._read(self._deadline)
            found = found + news if reading is self._reading else news
        if self._own is not None:
            return await self._own.whole()
        ticket = await self._admit()
        if self._recording is not None:
            self._recording.whole(found[-1])
        self._settle("replayed")
        await ticket.settled()
        return found[-1]

    async def _read(self, until: float) -> list[bytes]:
        """Events of the owner; none, if time passed or the role or the owner changed. Raises ApiError."""
        try:
            found = await self._reading.events(min(until, self._deadline))
        except Lost:
            await self._claim_anew()
            return []
        except RedisUnavailable as fault:
            raise self._failed(unavailable()) from fault
        except Unreadable as fault:
            raise self._failed(
                server_error("The answer kept for this idempotency key cannot be read. Send a new key.", status=503)
            ) from fault
        if not found and not self._reading.complete and self._loop.time() >= self._deadline:
            raise self._failed(
                server_error(
                    f"The first request with this idempotency key was not answered within {self._request.timeout_s:g} "
                    "s. Send it again.",
                    status=504,
                    code="request_timeout",
                )
            )
        return found

    async def _claim_anew(self) -> None:
        if self._ticket is not None:
            raise self._failed(
                overloaded(
                    "The request whose answer was replayed here broke off. Send it again with the same idempotency "
                    "key.",
                    code="idempotent_original_lost",
                )
            )
        try:
            held = await self._room.claim(self._scope, self._request.id)
        except RedisUnavailable as fault:
            raise unavailable() from fault
        if not isinstance(held, Share):
            self._reading = held
            return
        own = await self._room.own(held, self._request.execute)
        self._own = await own.__aenter__()
        self._stop_waiting()
        if self.client_left:
            own.left()

    async def _admit(self) -> Ticket:
        if self._ticket is None:
            self._ticket = await self._request.admit_replay()
            self._recording = self._request.record(self._ticket)
            self._stop_waiting()
        return self._ticket

    def _failed(self, error: ApiError) -> ApiError:
        self._settle("failed", error.body.code)
        return error

    async def __aenter__(self) -> Replay:
        self._waiting = True
        self._room.wait(self._scope, 1)
        return self

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._room.wait(self._scope, -1)

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_waiting()
        if self._own is not None:
            await self._own.__aexit__(kind, fault, trace)
        elif self.client_left:
            self._settle("aborted")
        elif kind is not None and issubclass(kind, asyncio.CancelledError):
            self._settle("failed", "gateway_stopping")
        else:
            self._settle("failed", "internal_error")

    def _settle(self, status: Status, error_code: str | None = None) -> None:
        """Settle the replay, if it was admitted; once."""
        ticket, observer = self._ticket, self._request.observer
        if ticket is None:
            if self._own is None:
                observer.refused(499 if status == "aborted" else 503, error_code)
            return
        if self._settled:
            return
        self._settled = True
        ticket.settle(status, TokenUsage(), attempts=0, error_code=error_code)
        if self._recording is not None:
            assert ticket.event is not None
            self._recording.ended(ticket.event, None)
        observer.settled(
            ticket.draft.route,
            ticket.draft.api,
            status,
            TokenUsage(),
            error_code=error_code,
            charged_nano_usd=ticket.charged_nano_usd,
            total_s=ticket.age_s,
        )
        _log.info(
            "request",
            request_id=str(ticket.request_id),
            original_request_id=str(self._reading.owner),
            client_request_id=ticket.draft.client_request_id,
            tenant=ticket.principal.tenant_name,
            key_id=ticket.principal.key_id,
            route=ticket.draft.route,
            status=status,
            error_code=error_code,
            streamed=self.streamed,
            charged_nano_usd=ticket.charged_nano_usd,
            total_ms=round(ticket.age_s * 1000),
        )


def unavailable() -> ApiError:
    return overloaded(
        "The gateway cannot reach its own services at the moment. Try again shortly.", code="service_unavailable"
    )
