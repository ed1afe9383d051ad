"""The worker's HTTP door: OpenAI's chats, completions, embeddings and models; tokens; health; and its operator's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from litestar import Litestar, MediaType, Request, Response, Router, get, post
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from worker.protocol.chat import Model, ModelList
from worker.protocol.errors import ApiError, model_not_found, overloaded, server_error
from worker.server.body import read
from worker.server.call import Call
from worker.server.chat import ChatExchange
from worker.server.completion_parameters import read_completion_parameters
from worker.server.completions import CompletionExchange
from worker.server.control import control_routes
from worker.server.door import Door
from worker.server.embeddings import EmbeddingExchange, read_embedding_parameters
from worker.server.kv_event_stream import KVEventStream
from worker.server.metrics import Metrics
from worker.server.parameters import read_chat_parameters
from worker.server.responder import KEEPALIVE_S, Exchange, Responder
from worker.server.service import ModelService
from worker.server.tokens import token_routes

MAX_BODY_BYTES: Final = 32 * 1024 * 1024

log = structlog.get_logger("penstock.worker")


class Health(msgspec.Struct, frozen=True):
    """``status``: ``ok``, ``draining`` or ``dead``; the numbers are the engine's after its latest step."""

    status: str
    model: str
    running: int
    waiting: int
    kv_usage: float


def create_app(
    service: ModelService,
    door: Door,
    *,
    events: KVEventStream | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keepalive_s: float = KEEPALIVE_S,
) -> Litestar:
    """The ASGI application of one model. ``events``: the changes of the prefix cache, if the engine tells them."""
    metrics = Metrics(service.engine, service.name)
    info = service.engine.info
    model = Model(id=service.name, created=int(time.time()), owned_by="penstock", max_model_len=info.max_model_len)

    async def respond(
        request: Request[Any, Any, Any], endpoint: str, made: Callable[[bytes, Call], Exchange]
    ) -> Responder:
        counted = metrics.request(endpoint)
        try:
            if door.draining:
                raise overloaded("The worker is stopping. Send the request again.", code="worker_stopping")
            call = door.call(request.headers)
            exchange = await read(await request.body(), lambda body: made(body, call))
        except ApiError as fault:
            counted.end("failed" if fault.status >= 500 else "refused", None, 0, 0)
            raise
        except HTTPException as fault:
            # The body is too long, or its sender left in the midst of it.
            counted.end("aborted" if fault.status_code >= 500 else "refused", None, 0, 0)
            raise
        return Responder(exchange, call, door, counted, keepalive_s=keepalive_s)

    @post("/chat/completions")
    async def chat_completions(request: Request[Any, Any, Any]) -> Responder:
        def made(body: bytes, call: Call) -> Exchange:
            return ChatExchange(service, read_chat_parameters(body, info.vocab_size), call)

        return await respond(request, ChatExchange.endpoint, made)

    @post("/completions")
    async def completions(request: Request[Any, Any, Any]) -> Responder:
        def made(body: bytes, call: Call) -> Exchange:
            return CompletionExchange(service, read_completion_parameters(body, info.vocab_size), call)

        return await respond(request, CompletionExchange.endpoint, made)

    @post("/embeddings")
    async def embeddings(request: Request[Any, Any, Any]) -> Responder:
        def made(body: bytes, call: Call) -> Exchange:
            parameters = read_embedding_parameters(body, info.vocab_size, info.hidden_size)
            return EmbeddingExchange(service, parameters, call)

        return await respond(request, EmbeddingExchange.endpoint, made)

    @get("/models", sync_to_thread=False)
    def models() -> ModelList:
        return ModelList(data=[model])

    @get("/models/{name:path}", sync_to_thread=False)
    def one_model(name: FromPath[str]) -> Model:
        if name.removeprefix("/") != model.id:
            raise model_not_found(name.removeprefix("/"))
        return model

    @get("/health", sync_to_thread=False)
    def health() -> Response[Health]:
        stats = service.engine.stats
        status = "dead" if service.engine.dead else "draining" if door.draining else "ok"
        report = Health(status, service.name, stats.running, stats.waiting, round(stats.kv_usage, 4))
        return Response(report, status_code=200 if status == "ok" else 503)

    doors: list[ControllerRouterHandler] = [
        Router(
            "/v1",
            guards=[door.guard],
            route_handlers=[chat_completions, completions, embeddings, models, one_model],
        ),
        *token_routes(service, door),
        health,
        *control_routes(service.engine, door, metrics, events),
    ]
    return Litestar(
        doors,
        openapi_config=None,
        logging_config=None,
        request_max_body_size=max_body_bytes,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error(max_body_bytes), Exception: _unexpected},
    )


def _api_error(_: Request[Any, Any, Any], fault: ApiError) -> Response[bytes]:
    return Response(fault.encode(), status_code=fault.status, headers=fault.headers, media_type=MediaType.JSON)


def _http_error(max_body_bytes: int) -> Callable[[Request[Any, Any, Any], HTTPException], Response[bytes]]:
    def handle(request: Request[Any, Any, Any], fault: HTTPException) -> Response[bytes]:
        """Litestar's own refusals, in OpenAI's shape."""
        path = request.scope["path"]
        if fault.status_code == 404:
            error = ApiError(404, f"There is nothing at {path}.", code="not_found")
        elif fault.status_code == 405:
            error = ApiError(405, f"{path} does not take {request.method}.", code="method_not_allowed")
        elif fault.status_code == 413:
            error = ApiError(413, f"The body is over {max_body_bytes} bytes.", code="request_too_large")
        else:
            error = ApiError(fault.status_code, str(fault.detail))
        error.headers.update(fault.headers or {})
        return _api_error(request, error)

    return handle


def _unexpected(request: Request[Any, Any, Any], fault: Exception) -> Response[bytes]:
    log.error("request failed", path=request.scope["path"], exc_info=fault)
    return _api_error(request, server_error("The worker failed on this request. Its log has the details."))
