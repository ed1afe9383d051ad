"""Everything is wired here, once: settings in, a Litestar application out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from litestar import Litestar
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import ScalarRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from sqlalchemy import text

from gateway.administration.caches import CacheAdministration
from gateway.administration.prompts import PromptAdministration
from gateway.admission.redis import create_redis
from gateway.admission.wiring import create_admission
from gateway.backends.brands import BRANDS
from gateway.backends.families import create_backends
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.liveness import prober
from gateway.backends.prompt_counts import PromptCounts
from gateway.backends.relay import Relay
from gateway.backends.time_limits import TimeLimits
from gateway.backends.transport import Transport
from gateway.backends.trial import Trials
from gateway.billing.alerts import Alerts
from gateway.billing.dead import DeadEvents
from gateway.billing.drainer import Drainer
from gateway.billing.prices import PriceBook
from gateway.billing.reports import end_user_hasher
from gateway.cache.erasing import CachedAnswers
from gateway.clock import Clock, SystemClock
from gateway.db.engine import create_engine, disposing, transaction
from gateway.db.migrate import check_schema
from gateway.http.admin.router import admin_router
from gateway.http.anthropic.count_tokens import count_tokens_handler
from gateway.http.anthropic.door import MESSAGES, MessagesDoor
from gateway.http.cors import CrossOrigin, Origins
from gateway.http.dispatch import Dispatch
from gateway.http.draining import Drain
from gateway.http.errors import EXCEPTION_HANDLERS
from gateway.http.fleet import fleet_handlers
from gateway.http.health import health_handlers
from gateway.http.inference import BodyLimits, Inference, inference_handler
from gateway.http.invoices import invoice_handlers
from gateway.http.metrics import metrics_handler
from gateway.http.openai.chat import CHAT, ChatDoor
from gateway.http.openai.completions import COMPLETIONS, CompletionsDoor
from gateway.http.openai.embeddings import EMBEDDINGS, EmbeddingsDoor
from gateway.http.openai.models import model_handlers
from gateway.http.openai.responses import RESPONSES, ResponsesDoor
from gateway.http.openai.stored_responses import stored_response_handlers
from gateway.http.prompts import tenant_prompt_handlers
from gateway.http.tenant_usage import tenant_usage_handlers
from gateway.http.usage import usage_handlers
from gateway.http.websocket import websocket_handler
from gateway.idempotency.erasing import IdempotentAnswers
from gateway.idempotency.service import Idempotency
from gateway.idempotency.store import SCRIPTS as IDEMPOTENCY_SCRIPTS
from gateway.memory import Memory
from gateway.memory_rooms import MemoryRooms
from gateway.observability.backend_gauges import backend_gauges
from gateway.observability.metrics import Gauge, Metrics
from gateway.observability.observer import Observability
from gateway.observability.tracing import Tracing, TracingNotInstalled, tracing_wanted
from gateway.pipeline import Pipeline
from gateway.promptlog.eraser import Erasable
from gateway.responses.erasing import StoredResponses
from gateway.responses.retention import ResponseRetention
from gateway.responses.store import ResponseStore
from gateway.routing.declared import Declared
from gateway.routing.load import LoadExchange
from gateway.routing.policy import Balancer
from gateway.routing.probes import Probes
from gateway.routing.registry import Registry
from gateway.routing.route import Endpoint
from gateway.secret_key import SecretKey
from gateway.settings import Settings, SettingsError
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.service import Tenants
from gateway.tokens.counter import PromptCounter

CATALOG_CACHE_S = 5.0
SCALAR_VERSION = "1.72.1"
"""Of the script that shows the API reference, and the only thing that the page fetches from elsewhere."""


def create_app(settings: Settings, *, clock: Clock | None = None) -> Litestar:
    """One gateway replica. It connects when its lifespan begins; Postgres and Redis may be away then.

    Raises SettingsError.
    """
    clock = clock or SystemClock()
    if settings.secret_key is None:
        raise SettingsError(
            "PENSTOCK_SECRET_KEY is not set; make one with `openssl rand -hex 32`, give it to all replicas, and keep it"
        )
    engine = create_engine(settings.database_url)
    # Sums over the ledger may take long. Nobody's key or budget waits for a connection until reports are done.
    budgets_engine = create_engine(settings.database_url, pool_size=4)
    reports_engine = create_engine(settings.database_url, pool_size=4)
    hash_end_user = end_user_hasher(settings.secret_key)
    admission = create_admission(settings, budgets_engine, clock)
    tenants = Tenants(engine, clock, cache_s=settings.principal_cache_s)
    catalog = Catalog(engine, clock, cache_s=CATALOG_CACHE_S)
    prices = PriceBook(engine, clock, cache_s=CATALOG_CACHE_S)
    registry = Registry(settings.redis_url, ttl_s=settings.worker_ttl_s, timeout_s=settings.redis_timeout_s)
    secret_key = SecretKey(settings.secret_key)
    declared = Declared(engine, secret_key, BRANDS)

    def endpoints(pool: str) -> list[Endpoint]:
        return [*registry.endpoints(pool), *declared.endpoints(pool)]

    def trusted_endpoints(pool: str) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints(pool) if not balancer.doubtful(endpoint)]

    drain = Drain()
    transport = Transport()
    balancer = Balancer(endpoints, clock)
    limits = TimeLimits(
        connect_s=settings.connect_timeout_s,
        first_byte_s=settings.first_byte_timeout_s,
        idle_s=settings.idle_timeout_s,
    )
    worker = FleetWorker(settings.fleet_token)
    backends = create_backends(worker, clock)
    relay = Relay(transport, balancer, backends, limits)
    load = LoadExchange(settings.redis_url, balancer, timeout_s=settings.redis_timeout_s)
    probes = Probes(
        lambda: [*registry.all(), *declared.all()],
        balancer,
        prober(transport, backends),
        clock,
        every_s=settings.probe_interval_s,
    )
    counter = PromptCounter(endpoints, lambda endpoint: worker.counting(transport, endpoint))
    drainer = Drainer(
        engine,
        settings.redis_url,
        clock,
        interval_s=settings.drain_interval_s,
        keep_months=settings.ledger_retention_months,
    )
    alerts = Alerts(engine, settings.redis_url, secret_key, clock, redis_timeout_s=settings.redis_timeout_s)
    directory = Directory(
        engine, clock, secret_key=secret_key, announce=admission.announce_generation, forget=tenants.forget
    )
    idempotency_redis = create_redis(
        settings.redis_url,
        timeout_s=settings.redis_timeout_s,
        scripts=IDEMPOTENCY_SCRIPTS,
        name="penstock-idempotency",
    )
    idempotency = Idempotency(idempotency_redis, secret_key, clock)
    metrics = Metrics()
    metrics.watch(
        Gauge(
            "open_requests", "Requests admitted here and not settled yet.", (), lambda: [((), admission.open_requests)]
        )
    )
    metrics.watch(
        Gauge(
            "waiting_settlements",
            "Settlements that Redis has not taken yet.",
            (),
            lambda: [((), admission.waiting_settlements)],
        )
    )
    for gauge in backend_gauges(balancer.snapshot):
        metrics.watch(gauge)
    tracing = _create_tracing()
    memory_engine = create_engine(settings.database_url, pool_size=2)
    rooms = MemoryRooms(settings, memory_engine, secret_key, clock, metrics)
    pipeline = Pipeline(
        tenants=tenants,
        catalog=catalog,
        prices=prices,
        counter=counter,
        admission=admission,
        relay=relay,
        idempotency=idempotency,
        secret_key=secret_key,
        observability=Observability(metrics, tracing),
        memory=Memory(rooms.cache, rooms.log, endpoints),
        clock=clock,
        keepalive_s=settings.keepalive_s,
    )

    # Answers that wait to be kept must not keep anybody's key waiting.
    responses_engine = create_engine(settings.database_url, pool_size=4)
    responses = ResponseStore(
        responses_engine, secret_key, clock, keep_days=settings.responses_retention_days, count=metrics.kept
    )
    others: list[Erasable] = [IdempotentAnswers(idempotency_redis), StoredResponses(memory_engine)]
    if rooms.cache is not None:
        others.insert(0, CachedAnswers(rooms.cache))
    prompts = PromptAdministration(
        memory_engine, rooms.reader, rooms.eraser(others), partial(end_user_hash, secret_key)
    )
    responses_door = partial(ResponsesDoor, store=responses, clock=clock, most_bytes=settings.max_body_bytes)
    origins = Origins(settings.cors_origins)
    body_limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s)
    doors = {
        reference: partial(Inference, door, pipeline, body_limits)
        for reference, door in (
            (CHAT, ChatDoor),
            (COMPLETIONS, CompletionsDoor),
            (EMBEDDINGS, EmbeddingsDoor),
            (RESPONSES, responses_door),
            (MESSAGES, MessagesDoor),
        )
    }

    @asynccontextmanager
    async def running(_app: Litestar) -> AsyncIterator[None]:
        # Left in reverse: requests have ended by then, settlements reach Redis, then what they left is drained.
        async with (
            disposing(engine, budgets_engine, reports_engine, responses_engine, memory_engine),
            transport,
            registry,
            declared,
            load,
            probes,
            counter,
            idempotency,
            rooms,
            alerts,
            ResponseRetention(responses_engine, clock),
        ):
            await drainer.start()
            await admission.start()
            try:
                yield
            finally:
                await drain.ended()
                await admission.close()
                await drainer.close()
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)

    async def postgres_answers() -> None:
        async with transaction(engine) as connection:
            await connection.execute(text("SELECT 1"))

    async def schema_is_current() -> None:
        await check_schema(engine)

    app = Litestar(
        route_handlers=[
            *(inference_handler(reference, make) for reference, make in doors.items()),
            websocket_handler(pipeline, origins, idle_s=settings.websocket_idle_s),
            count_tokens_handler(pipeline, PromptCounts(transport, trusted_endpoints), body_limits),
            *stored_response_handlers(pipeline, responses),
            *model_handlers(pipeline),
            *usage_handlers(tenants, reports_engine, hash_end_user),
            *tenant_usage_handlers(tenants, reports_engine, hash_end_user),
            *invoice_handlers(tenants, reports_engine, clock),
            *tenant_prompt_handlers(tenants, prompts, body_timeout_s=settings.body_timeout_s),
            admin_router(
                tenants=tenants,
                directory=directory,
                catalog=catalog,
                backends=BackendChanges(engine, secret_key, BRANDS, changed=declared.changed),
                trials=Trials(transport, backends),
                prices=prices,
                dead=DeadEvents(engine, clock),
                engine=reports_engine,
                body_timeout_s=settings.body_timeout_s,
                prompts=prompts,
                caches=CacheAdministration(memory_engine, rooms.cache),
            ),
            *fleet_handlers(registry, catalog, fleet_token=settings.fleet_token),
            metrics_handler(metrics, token=settings.metrics_token),
            *health_handlers(
                {"postgres": postgres_answers, "schema": schema_is_current, "redis": registry.refresh},
                lambda: sum(not worker.draining for worker in registry.workers()) + len(declared.all()),
                needs_backend=settings.ready_needs_backend,
                draining=lambda: drain.began,
                notes=rooms.notes,
            ),
        ],
        lifespan=[running],
        middleware=[drain.middleware],
        state=State({"drain": drain}),
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=OpenAPIConfig(
            title="Penstock",
            version=version("penstock"),
            description="An LLM gateway with its own fleet of workers. `/v1` speaks the OpenAI and the Anthropic API.",
            path="/docs",
            render_plugins=[ScalarRenderPlugin(version=SCALAR_VERSION, css_url="data:text/css,", favicon="", path="/")],
            components=Components(
                security_schemes={
                    "key": SecurityScheme(type="http", scheme="bearer", description="An API key, `sk-penstock-...`."),
                    "admin_key": SecurityScheme(
                        type="http",
                        scheme="bearer",
                        description="An administrator's key: `penstock admin-key create` issues the first.",
                    ),
                }
            ),
            security=[{"key": []}],
        ),
        logging_config=None,
        request_max_body_size=settings.max_body_bytes,
        debug=False,
    )
    app.asgi_handler = Dispatch(app.asgi_handler, {reference.path: make for reference, make in doors.items()}, drain)
    if settings.cors_origins:
        # Around all of it, for answers that no handler gives.
        app.asgi_handler = CrossOrigin(app.asgi_handler, origins)
    return app


def _create_tracing() -> Tracing | None:
    """Raises SettingsError."""
    try:
        return Tracing() if tracing_wanted(os.environ) else None
    except TracingNotInstalled as fault:
        raise SettingsError(str(fault)) from fault
