"""What is told of one request on its way: to the metrics always, to a trace if there is one."""

from __future__ import annotations

from gateway.apis import Api
from gateway.billing.usage import Status, TokenUsage
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import AttemptSpan, RequestSpan, Tracing

_STATUSES: dict[Status, int] = {"ok": 200, "cache_hit": 200, "replayed": 200, "aborted": 499}


class Observability:
    """One for the whole gateway."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self.tracing = tracing

    def begin(self, request_id: str, path: str, traceparent: str | None) -> Observer:
        span = None if self.tracing is None else self.tracing.begin(request_id, path, traceparent)
        return Observer(self.metrics, span)


class Observer:
    """Of one request. Exactly one of ``refused`` and ``settled`` ends it."""

    def __init__(self, metrics: Metrics, span: RequestSpan | None) -> None:
        self._metrics = metrics
        self._span = span

    @property
    def trace_id(self) -> str | None:
        return None if self._span is None else self._span.trace_id

    def attempt(
        self, api: Api, model: str, backend: str, provider: str, address: str, *, max_tokens: int | None, stream: bool
    ) -> Attempt:
        span = self._span
        if span is None:
            return Attempt(self._metrics, backend, None)
        begun = span.attempt(api, model, backend, provider, address, max_tokens=max_tokens, stream=stream)
        return Attempt(self._metrics, backend, begun)

    def refused(self, status: int, code: str | None) -> None:
        self._metrics.refused(code)
        if self._span is not None:
            self._span.end(status, {}, error_code=code or "invalid_request")

    def settled(
        self,
        route: str,
        api: Api,
        status: Status,
        usage: TokenUsage,
        *,
        error_code: str | None,
        error_status: int | None = None,
        charged_nano_usd: int,
        total_s: float,
        first_token_ms: int | None = None,
    ) -> None:
        self._metrics.settled(
            route,
            api,
            status,
            usage,
            charged_nano_usd=charged_nano_usd,
            total_s=total_s,
            first_token_ms=first_token_ms,
        )
        if self._span is not None:
            attributes: dict[str, str | int | None] = {
                "penstock.route": route,
                "penstock.status": status,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
            self._span.end(error_status or _STATUSES.get(status, 500), attributes, error_code=error_code)


class Attempt:
    """One attempt at a backend, until it ends."""

    def __init__(self, metrics: Metrics, backend: str, span: AttemptSpan | None) -> None:
        self._metrics = metrics
        self._backend = backend
        self._span = span
        self._ended = False

    @property
    def traceparent(self) -> str | None:
        """To be handed on to the backend."""
        return None if self._span is None else self._span.traceparent

    def end(self, error_code: str | None, usage: TokenUsage) -> None:
        """None: it went well, or the client left. Later calls are ignored."""
        if self._ended:
            return
        self._ended = True
        self._metrics.attempted(self._backend, error_code)
        if self._span is not None:
            self._span.end(error_code, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
