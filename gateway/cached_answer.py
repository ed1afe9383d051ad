"""Answers that no backend gives: kept ones, and those that an identical request under way shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from gateway.admission.ticket import Saving, Ticket
from gateway.answerable import Answerable
from gateway.ask import Ask, Call
from gateway.assembly import replay, with_echo_of
from gateway.billing.usage import Status, TokenUsage, UsageEvent, usd_text
from gateway.cache.found import Hit, Miss
from gateway.long_work import worked
from gateway.observability.observer import Observer
from gateway.order import Plan
from gateway.recording import Recording
from gateway.telemetry import Line, log_line

CACHE: Final = "x-penstock-cache"


class HitLine(Line, kw_only=True):
    request_id: str
    origin_request_id: str
    trace_id: str | None
    client_request_id: str | None
    tenant: str
    project: str
    key_id: str
    api: str
    route: str
    status: Status
    streamed: bool
    cache: str
    similarity: float | None
    charged_nano_usd: int
    saved_nano_usd: int
    total_ms: int


class CachedAnswer:
    """A kept answer to an admitted request. Its ticket is settled with the first that is read of it, once."""

    def __init__(
        self,
        call: Call,
        ask: Ask,
        plan: Plan,
        ticket: Ticket,
        hit: Hit,
        observer: Observer,
        recording: Recording | None,
        *,
        hit_price_bp: int,
    ) -> None:
        self._call = call
        self._ask = ask
        self._plan = plan
        self._ticket = ticket
        self._hit = hit
        self._observer = observer
        self._recording = recording
        self._hit_price_bp = hit_price_bp
        self.complete = False
        self.client_left = False

    @property
    def streamed(self) -> bool:
        return self._ask.stream

    @property
    def timeout_s(self) -> float:
        return self._plan.route.timeout_s

    def left(self) -> None:
        self.client_left = True

    def headers(self) -> list[tuple[str, str]]:
        headers = [*self._ticket.headers.items(), (CACHE, self._hit.tier)]
        if self.complete and not self.streamed:
            headers.append(("x-penstock-cost-usd", usd_text(self._ticket.charged_nano_usd)))
        return headers

    async def events(self) -> list[bytes]:
        if self.complete:
            return []
        events = await worked(len(self._hit.body), self._events)
        if self._recording is not None:
            self._recording.feed(events)
        self._settle("cache_hit")
        return events

    async def whole(self) -> bytes:
        body = await worked(len(self._hit.body), self._body)
        if self._recording is not None:
            self._recording.whole(body)
        self._settle("cache_hit")
        await self._ticket.sent()
        return body

    async def __aenter__(self) -> CachedAnswer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client_left:
            self._settle("aborted")
        elif kind is not None and issubclass(kind, asyncio.CancelledError):
            self._settle("failed", "gateway_stopping")
        else:
            self._settle("failed", "internal_error")

    def _settle(self, status: Status, error_code: str | None = None) -> None:
        ticket, plan, hit = self._ticket, self._plan, self._hit
        if ticket.event is not None:
            return
        self.complete = status == "cache_hit"
        saving = Saving(hit.tier, hit.usage, self._hit_price_bp) if self.complete else None
        ticket.settle(status, TokenUsage(), attempts=0, error_code=error_code, saving=saving)
        event = self._row()
        self._observer.settled(
            plan.route.name,
            self._ask.api,
            status,
            TokenUsage(),
            error_code=error_code,
            charged_nano_usd=event.charged_nano_usd,
            total_s=ticket.age_s,
        )
        if self._recording is not None:
            self._recording.ended(event, hit.usage, cache=hit.tier)
        principal = plan.principal
        log_line(
            HitLine(
                event="request",
                request_id=str(ticket.request_id),
                origin_request_id=hit.origin,
                trace_id=self._observer.trace_id,
                client_request_id=self._call.client_request_id,
                tenant=principal.tenant_name,
                project=principal.project_name,
                key_id=principal.key_id,
                api=self._ask.api,
                route=plan.route.name,
                status=status,
                streamed=self.streamed,
                cache=hit.tier,
                similarity=None if hit.similarity is None else round(hit.similarity, 4),
                charged_nano_usd=event.charged_nano_usd,
                saved_nano_usd=event.saved_nano_usd,
                total_ms=round(ticket.age_s * 1000),
            )
        )

    def _body(self) -> bytes:
        return with_echo_of(self._ask.raw, self._hit.body)

    def _events(self) -> list[bytes]:
        return replay(self._ask.api, self._body(), include_usage=self._ask.include_usage)

    def _row(self) -> UsageEvent:
        event = self._ticket.event
        assert event is not None
        return event


class SharedAnswer:
    """Waits for the answer of an identical request that is under way, and answers by itself if none comes of it."""

    def __init__(
        self,
        miss: Miss,
        answer: Callable[[Hit | Miss], Answerable],
        *,
        streamed: bool,
        timeout_s: float,
        keepalive_s: float,
        headers: Mapping[str, str],
    ) -> None:
        """``answer``: makes the answer of what came of waiting. ``headers``: that any answer has."""
        self._miss = miss
        self._answer = answer
        self._streamed = streamed
        self._timeout_s = timeout_s
        self._keepalive_s = keepalive_s
        self._headers = headers
        self._waiting: asyncio.Task[Hit | Miss] | None = None
        self._found: Answerable | None = None
        self._client_left = False

    @property
    def streamed(self) -> bool:
        return self._streamed

    @property
    def timeout_s(self) -> float:
        """The route's limit twice: for waiting, and for an answer of its own after all."""
        return 2 * self._timeout_s

    @property
    def complete(self) -> bool:
        return self._found is not None and self._found.complete

    @property
    def client_left(self) -> bool:
        return self._client_left

    def left(self) -> None:
        self._client_left = True
        if self._found is not None:
            self._found.left()

    def headers(self) -> list[tuple[str, str]]:
        return [*self._headers.items()] if self._found is None else self._found.headers()

    async def events(self) -> list[bytes]:
        found = await self._wait(self._keepalive_s)
        return [] if found is None else await found.events()

    async def whole(self) -> bytes:
        found = await self._wait(None)
        assert found is not None
        return await found.whole()

    async def _wait(self, limit_s: float | None) -> Answerable | None:
        if self._found is None:
            if self._waiting is None:
                self._waiting = asyncio.get_running_loop().create_task(self._miss.follow(), name="follow a flight")
            done, _ = await asyncio.wait((self._waiting,), timeout=limit_s)
            if not done:
                return None
            self._found = await self._answer(self._waiting.result()).__aenter__()
        return self._found

    async def __aenter__(self) -> SharedAnswer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.cancel()  # it ends by itself; nothing here waits before the request is settled
        if self._found is None:
            # Nobody waits any more: it is settled as an answer of its own, of which nothing was read.
            self._miss.drop()
            self._found = await self._answer(self._miss).__aenter__()
            if self._client_left:
                self._found.left()
        await self._found.__aexit__(kind, fault, trace)
