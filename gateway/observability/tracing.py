"""OpenTelemetry traces: a span for each request, and below it one for each attempt at a backend.

Names and attributes: the semantic conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
No bodies, no keys. Trace context is W3C's (https://www.w3.org/TR/trace-context/), taken from the caller and handed on
to the backend. Off unless an exporter is configured; the SDK is the extra ``otel`` and is loaded only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from gateway.apis import Api

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Environment variables of the SDK; one of them switches tracing on."""
OPERATIONS: Final[dict[Api, str]] = {
    "chat_completions": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}


class TracingNotInstalled(Exception):
    def __init__(self) -> None:
        super().__init__(
            "an OpenTelemetry exporter is configured, but the SDK is not installed: pip install 'penstock[otel]', or "
            f"unset {' and '.join(ENDPOINTS)}"
        )


def tracing_wanted(environ: Mapping[str, str]) -> bool:
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and any(environ.get(name) for name in ENDPOINTS)


class Tracing:
    """One for the whole gateway. ``close`` sends what is left; it may take seconds."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """``exporter``: None takes OTLP over HTTP, as the environment configures it. Raises TracingNotInstalled."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as fault:
            raise TracingNotInstalled from fault
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these.
        resource = Resource({"service.name": "penstock", "service.version": version("penstock")}).merge(
            Resource.create()
        )
        if resource.attributes.get("service.name", "").startswith("unknown_service"):  # type: ignore[union-attr]
            resource = resource.merge(Resource({"service.name": "penstock"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("penstock", version("penstock"))

    def begin(self, request_id: str, path: str, traceparent: str | None) -> RequestSpan:
        return RequestSpan(self._tracer, request_id, path, traceparent)

    def close(self) -> None:
        self._provider.shutdown()


class RequestSpan:
    """One request, from its arrival to its settlement."""

    def __init__(self, tracer: Tracer, request_id: str, path: str, traceparent: str | None) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        self._tracer = tracer
        self._span = tracer.start_span(
            f"POST {path}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": path, "penstock.request.id": request_id},
        )
        self._ended = False

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def attempt(
        self, api: Api, model: str, backend: str, provider: str, address: str, *, max_tokens: int | None, stream: bool
    ) -> AttemptSpan:
        """``provider``: well-known name or the server's brand; ``address``: the backend's URL."""
        return AttemptSpan(self._tracer, self._span, api, model, backend, provider, address, max_tokens, stream)

    def end(self, status: int, attributes: Mapping[str, str | int | None], *, error_code: str | None) -> None:
        """``status``: of the HTTP answer, or what it would have been. Later calls are ignored."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute("http.response.status_code", status)
        _describe(self._span, attributes, error_code, failed=status >= 500)
        self._span.end()


class AttemptSpan:
    """One attempt at a backend."""

    def __init__(
        self,
        tracer: Tracer,
        parent: Span,
        api: Api,
        model: str,
        backend: str,
        provider: str,
        address: str,
        max_tokens: int | None,
        stream: bool,
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from yarl import URL

        url = URL(address)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": OPERATIONS[api],
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": stream,
            "penstock.backend": backend,
        }
        if url.host is not None:
            attributes |= {"server.address": url.host, "server.port": url.port or 0}
        if max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = max_tokens
        self._span = tracer.start_span(
            f"{OPERATIONS[api]} {model}",
            context=set_span_in_context(parent),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        context = self._span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, error_code: str | None, *, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        usage: dict[str, str | int | None] = {}
        if prompt_tokens or completion_tokens:
            usage = {"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": completion_tokens}
        _describe(self._span, usage, error_code, failed=error_code is not None)
        self._span.end()


def _describe(span: Span, attributes: Mapping[str, str | int | None], error_code: str | None, *, failed: bool) -> None:
    from opentelemetry.trace import Status, StatusCode

    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)
    if error_code is not None:
        span.set_attribute("error.type", error_code)
    if failed:
        span.set_status(Status(StatusCode.ERROR))
