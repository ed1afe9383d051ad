"""The answer to an admitted request: read from its exchange, settled exactly once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from msgspec.structs import replace

from gateway.admission.ticket import Ticket
from gateway.apis import Api
from gateway.ask import Call
from gateway.backends.faults import BackendFault
from gateway.backends.relay import Exchange
from gateway.billing.usage import Status, TokenUsage, usd_text
from gateway.observability.observer import Observer
from gateway.order import Plan
from gateway.recording import Recording
from gateway.telemetry import Line, log_line
from worker.protocol.errors import ApiError


class RequestLine(Line, kw_only=True):
    """What the log tells of a settled request; times in milliseconds."""

    request_id: str
    trace_id: str | None
    client_request_id: str | None
    tenant: str
    project: str
    key_id: str
    api: Api
    route: str
    status: Status
    error_code: str | None
    streamed: bool
    backend: str | None
    attempts: int
    failed_attempts: list[str]
    prompt_tokens: int
    completion_tokens: int
    charged_nano_usd: int
    queue_ms: int | None
    first_token_ms: int | None
    total_ms: int
    event: str = "request"


class Answer:
    """An admitted request, about to be answered. An async context manager that settles it exactly once.

    Read it by ``events`` (streamed) or ``whole``. If the block ends before the answer is complete, the backend's
    connection is closed at once; ``left`` says beforehand that the client hung up, which makes the row ``aborted``.
    """

    def __init__(
        self,
        call: Call,
        plan: Plan,
        ticket: Ticket,
        exchange: Exchange,
        observer: Observer,
        *,
        keepalive_s: float,
        on_usage: Callable[[Plan, TokenUsage], None],
        recording: Recording | None = None,
        cache: str | None = None,
    ) -> None:
        """``on_usage`` is told what the backend reported in the end. ``cache``: what the answer cache said."""
        self._call = call
        self._plan = plan
        self._ticket = ticket
        self._exchange = exchange
        self._observer = observer
        self._keepalive_s = keepalive_s
        self._on_usage = on_usage
        self._recording = recording
        self._cache = cache
        self._settled = False
        self.client_left = False

    @property
    def streamed(self) -> bool:
        return self._ticket.draft.streamed

    @property
    def timeout_s(self) -> float:
        """The route's limit for the whole answer."""
        return self._plan.route.timeout_s

    @property
    def complete(self) -> bool:
        return self._exchange.complete

    def left(self) -> None:
        """The client hung up."""
        self.client_left = True

    def headers(self) -> list[tuple[str, str]]:
        """What the answer's head tells of it. Only a whole answer's cost is known before its head leaves."""
        headers = list(self._ticket.headers.items())
        if self._exchange.backend_id is not None:
            headers.append(("x-penstock-backend", self._exchange.backend_id))
        if self._cache is not None:
            headers.append(("x-penstock-cache", self._cache))
        if self._settled and not self.streamed:
            headers.append(("x-penstock-cost-usd", usd_text(self._ticket.charged_nano_usd)))
        return headers

    async def events(self) -> list[bytes]:
        """JSON of the events that came; none when it is time for a sign of life, or when the answer is ``complete``.

        Raises ApiError. Once it returned events, a backend had begun a good answer.
        """
        return await self._advance(self._keepalive_s)

    async def whole(self) -> bytes:
        """The JSON body. Raises ApiError."""
        events: list[bytes] = []
        while not self.complete:
            events += await self._advance(None)
        await self._ticket.sent()
        return events[-1]

    async def _advance(self, wait_s: float | None) -> list[bytes]:
        try:
            found = await self._exchange.events(wait_s=wait_s)
        except BackendFault as fault:
            self._settle("failed", fault.code, error_status=fault.status)
            raise fault.error() from fault
        except ApiError as error:  # no backend can be asked this
            self._settle("failed", error.body.code or error.body.type, error_status=error.status)
            raise
        if self._recording is not None and found:
            if self.streamed:
                self._recording.feed(found)
            else:
                self._recording.whole(found[-1])
        if self.complete:
            self._settle("ok")
        return found

    async def __aenter__(self) -> Answer:
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
        await self._exchange.__aexit__(kind, fault, trace)

    def _settle(self, status: Status, error_code: str | None = None, *, error_status: int | None = None) -> None:
        if self._settled:
            return
        self._settled = True
        exchange, principal, images = self._exchange, self._plan.principal, self._plan.prompt.images
        usage = exchange.usage
        if images and usage.prompt_tokens:
            # No backend tells how many there were.
            usage = replace(usage, images=images)
        self._ticket.settle(
            status,
            usage,
            backend=exchange.backend_id,
            attempts=exchange.attempts,
            error_code=error_code,
            first_token_ms=exchange.first_token_ms,
            queue_ms=exchange.queue_ms,
            relayed=self.streamed and exchange.handed_on,
            wasted=exchange.wasted,
            failed_attempts=exchange.failed_attempts,
        )
        self._on_usage(self._plan, usage)
        if self._recording is not None:
            event = self._ticket.event
            assert event is not None
            self._recording.ended(event, usage, cache=self._cache)
        self._observer.settled(
            self._plan.route.name,
            self._ticket.draft.api,
            status,
            usage,
            error_code=error_code,
            error_status=error_status,
            charged_nano_usd=self._ticket.charged_nano_usd,
            total_s=self._ticket.age_s,
            first_token_ms=exchange.first_token_ms,
        )
        log_line(
            RequestLine(
                request_id=self._plan.order.request_id,
                trace_id=self._observer.trace_id,
                client_request_id=self._call.client_request_id,
                tenant=principal.tenant_name,
                project=principal.project_name,
                key_id=principal.key_id,
                api=self._ticket.draft.api,
                route=self._plan.route.name,
                status=status,
                error_code=error_code,
                streamed=self.streamed,
                backend=exchange.backend_id,
                attempts=exchange.attempts,
                failed_attempts=exchange.failed_attempts,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                charged_nano_usd=self._ticket.charged_nano_usd,
                queue_ms=exchange.queue_ms,
                first_token_ms=exchange.first_token_ms,
                total_ms=exchange.elapsed_ms(),
            )
        )
