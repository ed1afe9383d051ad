"""``GET /v1/models`` and ``GET /v1/models/{model}``: what the caller's key may call, and nothing else."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.http.client import bearer
from gateway.pipeline import Pipeline
from gateway.routing.route import Route
from worker.protocol.chat import Model, ModelList
from worker.protocol.errors import model_not_found

OWNER = "penstock"


def model_handlers(pipeline: Pipeline) -> list[HTTPRouteHandler]:
    @get("/v1/models", operation_id="listModels", summary="List the models this key may call", tags=["Models"])
    async def list_models(request: Request[Any, Any, Any]) -> ModelList:
        routes = await pipeline.models(bearer(request.headers.get("authorization")))
        return ModelList(data=[_model(route) for route in routes])

    @get("/v1/models/{model:path}", operation_id="retrieveModel", summary="Describe one model", tags=["Models"])
    async def retrieve_model(request: Request[Any, Any, Any], model: FromPath[str]) -> Model:
        name = model.removeprefix("/")
        for route in await pipeline.models(bearer(request.headers.get("authorization"))):
            if route.name == name:
                return _model(route)
        raise model_not_found(name)

    return [list_models, retrieve_model]


def _model(route: Route) -> Model:
    # Routes bear no date of their own; clients only need the field to be there.
    return Model(id=route.name, created=0, owned_by=OWNER)
