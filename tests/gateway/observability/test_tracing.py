from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.billing.usage import TokenUsage
from gateway.observability.metrics import Metrics
from gateway.observability.observer import Observability
from gateway.observability.tracing import Tracing, tracing_wanted

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def observability(exporter: InMemorySpanExporter) -> Iterator[Observability]:
    tracing = Tracing(exporter)
    yield Observability(Metrics(), tracing)
    tracing.close()


def finished(observability: Observability, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    assert observability.tracing is not None
    observability.tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_and_its_attempt_are_spans_of_the_callers_trace(
    observability: Observability, exporter: InMemorySpanExporter
) -> None:
    observer = observability.begin("0199", "/v1/chat/completions", PARENT)
    assert observer.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    attempt = observer.attempt(
        "chat_completions", "small", "gpu-1", "vllm", "http://10.0.0.7:8000", max_tokens=64, stream=True
    )
    assert attempt.traceparent is not None
    assert attempt.traceparent.startswith("00-4bf92f3577b34da6a3ce929d0e0e4736-")
    attempt.end(None, TokenUsage(12, 5))
    observer.settled(
        "public", "chat_completions", "ok", TokenUsage(12, 5), error_code=None, charged_nano_usd=1, total_s=0.5
    )
    spans = finished(observability, exporter)
    request, chat = spans["POST /v1/chat/completions"], spans["chat small"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert (request.kind, chat.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert chat.parent is not None
    assert chat.parent.span_id == request.context.span_id
    assert f"{chat.context.span_id:016x}" == attempt.traceparent.split("-")[2]
    told = dict(chat.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "vllm"
    assert told["gen_ai.request.model"] == "small"
    assert told["gen_ai.request.max_tokens"] == 64
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (12, 5)
    assert (told["server.address"], told["server.port"]) == ("10.0.0.7", 8000)
    about = dict(request.attributes or {})
    assert about["penstock.request.id"] == "0199"
    assert about["http.response.status_code"] == 200
    assert request.status.status_code is StatusCode.UNSET
    assert request.resource.attributes["service.name"] == "penstock"


def test_faults_are_told_by_their_code(observability: Observability, exporter: InMemorySpanExporter) -> None:
    observer = observability.begin("1", "/v1/embeddings", None)
    attempt = observer.attempt("embeddings", "m", "b", "openai", "http://b", max_tokens=None, stream=False)
    attempt.end("backend_timeout", TokenUsage())
    attempt.end(None, TokenUsage())
    observer.settled(
        "r",
        "embeddings",
        "failed",
        TokenUsage(),
        error_code="backend_timeout",
        error_status=504,
        charged_nano_usd=0,
        total_s=1,
    )
    refused = observability.begin("2", "/v1/messages", "rubbish")
    refused.refused(429, "rate_limit_exceeded")
    spans = finished(observability, exporter)
    assert dict(spans["embeddings m"].attributes or {})["error.type"] == "backend_timeout"
    assert spans["embeddings m"].status.status_code is StatusCode.ERROR
    failed = spans["POST /v1/embeddings"]
    assert dict(failed.attributes or {})["http.response.status_code"] == 504
    assert failed.status.status_code is StatusCode.ERROR
    told = spans["POST /v1/messages"]
    assert dict(told.attributes or {})["error.type"] == "rate_limit_exceeded"
    assert (told.parent, told.status.status_code) == (None, StatusCode.UNSET)


def test_without_an_exporter_there_is_no_trace() -> None:
    observer = Observability(Metrics()).begin("1", "/v1/completions", PARENT)
    attempt = observer.attempt("completions", "m", "b", "vllm", "http://b", max_tokens=1, stream=False)
    assert (observer.trace_id, attempt.traceparent) == (None, None)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_an_endpoint_in_the_environment_switches_it_on(environ: dict[str, str], wanted: bool) -> None:
    assert tracing_wanted(environ) is wanted
