"""What metrics and traces are told of attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.observability.metrics import Metrics
from gateway.observability.observer import Observability
from gateway.observability.tracing import Tracing
from tests.gateway.backends.relay_support import Rig, read

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_each_attempt_is_a_span_that_its_backend_can_go_on_from(rig: Rig, upstream: Any) -> None:
    async def fails(c: Any) -> None:
        await c.status(500, b"{}")

    async def answers(c: Any) -> None:
        await c.begin()
        await c.token("a", 1)
        await c.done()

    first, second = await upstream(fails), await upstream(answers)
    rig.use(first.url, second.url)
    rig.alive[1] = replace(rig.alive[1], priority=1)
    exporter, metrics = InMemorySpanExporter(), Metrics()
    tracing = Tracing(exporter)
    observer = Observability(metrics, tracing).begin("0199", "/v1/chat/completions", CALLER)
    exchange = rig.open(observer=observer)
    await read(exchange)
    tracing.close()
    spans = {dict(span.attributes or {})["penstock.backend"]: span for span in exporter.get_finished_spans()}
    sent = [server.seen[0].headers["traceparent"].split("-") for server in (first, second)]
    assert {parts[1] for parts in sent} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert {parts[2] for parts in sent} == {f"{span.context.span_id:016x}" for span in spans.values()}
    assert dict(spans["w1"].attributes or {})["gen_ai.usage.output_tokens"] == 1
    assert dict(spans["w0"].attributes or {})["error.type"] == "backend_error"
    told = metrics.render().decode()
    assert 'penstock_backend_attempts_total{backend="w1",outcome="ok"} 1.0' in told
    assert 'penstock_backend_attempts_total{backend="w0",outcome="backend_error"} 1.0' in told
    assert len(spans) == exchange.attempts == 2
