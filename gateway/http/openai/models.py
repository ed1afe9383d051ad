"""``GET /v1/models`` and ``GET /v1/models/{model}``: what the caller's key may call, and nothing else.

In Anthropic's shape and pages for clients that send ``anthropic-version``, else in OpenAI's, which has no pages.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery

from gateway.http.anthropic.errors import VERSION_HEADER
from gateway.http.anthropic.models import ModelInfo, ModelPage, model_info, model_page
from gateway.http.client import api_key
from gateway.pipeline import Pipeline
from gateway.routing.route import Route
from worker.protocol.chat import Model, ModelList
from worker.protocol.errors import model_not_found

OWNER = "penstock"

_AnyRequest = Request[Any, Any, Any]


def model_handlers(pipeline: Pipeline) -> list[HTTPRouteHandler]:
    @get("/v1/models", operation_id="listModels", summary="List the models this key may call", tags=["Models"])
    async def list_models(
        request: _AnyRequest,
        limit: FromQuery[str | None] = None,
        before_id: FromQuery[str | None] = None,
        after_id: FromQuery[str | None] = None,
    ) -> ModelList | ModelPage:
        routes = await pipeline.models(_key(request))
        if _wants_anthropic(request):
            return model_page(routes, limit, before_id, after_id)
        return ModelList(data=[_model(route) for route in routes])

    @get("/v1/models/{model:path}", operation_id="retrieveModel", summary="Describe one model", tags=["Models"])
    async def retrieve_model(request: _AnyRequest, model: FromPath[str]) -> Model | ModelInfo:
        name = model.removeprefix("/")
        for route in await pipeline.models(_key(request)):
            if route.name == name:
                return model_info(route) if _wants_anthropic(request) else _model(route)
        raise model_not_found(name)

    return [list_models, retrieve_model]


def _key(request: _AnyRequest) -> str | None:
    return api_key(request.headers.get("authorization"), request.headers.get("x-api-key"))


def _wants_anthropic(request: _AnyRequest) -> bool:
    return VERSION_HEADER in request.headers


def _model(route: Route) -> Model:
    # Routes bear no date of their own; clients only need the field to be there.
    return Model(id=route.name, created=0, owned_by=OWNER)
