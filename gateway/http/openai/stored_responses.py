"""Stored responses of the caller's tenant: read, list what went in, delete. Another tenant's are not there.

Reference: https://developers.openai.com/api/reference/resources/responses
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, QueryParameter

from gateway.db.engine import DatabaseUnavailable
from gateway.http.client import api_key
from gateway.http.openai.responses import services_away
from gateway.http.operations import operation
from gateway.pipeline import Pipeline
from gateway.responses.conversation import Stored, id_of
from gateway.responses.store import ResponseStore
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError, bad_request

JSON: Final = "application/json"
ERRORS: Final = {
    "400": "A parameter is not valid; `param` names it.",
    "401": "No API key, or one that is not valid.",
    "403": "The key may not run models.",
    "404": "The response was not stored, has expired, or is another tenant's.",
    "503": "The gateway cannot reach its own services. Try again as `retry-after` says.",
}
AnyRequest = Request[Any, Any, Any]
Limit = Annotated[int, QueryParameter(ge=1, le=100, description="Most items of a page.")]
Order = Annotated[Literal["asc", "desc"], QueryParameter(description="`asc`: oldest first.")]
After = Annotated[str | None, QueryParameter(description="Id of the last item of the page before.")]
Stream = Annotated[bool, QueryParameter(description="Streams of stored responses are not replayed.")]


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct):
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def stored_response_handlers(pipeline: Pipeline, store: ResponseStore) -> list[HTTPRouteHandler]:
    documented = operation(ERRORS)

    async def caller(request: AnyRequest) -> Principal:
        return await pipeline.authenticate(
            api_key(request.headers.get("authorization"), request.headers.get("x-api-key"))
        )

    async def stored(request: AnyRequest, response_id: str) -> Stored:
        principal = await caller(request)
        try:
            found = await store.get(principal.tenant_id, response_id)
        except DatabaseUnavailable as fault:
            raise services_away() from fault
        if found is None:
            raise _not_found(response_id)
        return found

    @get(
        "/v1/responses/{response_id:str}",
        operation_id="getResponse",
        operation_class=documented,
        summary="Read a stored response",
        tags=["Responses"],
    )
    async def read(request: AnyRequest, response_id: FromPath[str], stream: Stream = False) -> Response[bytes]:
        if stream:
            raise bad_request("Stored responses are not streamed again. Leave 'stream' out.", param="stream")
        return _json((await stored(request, response_id)).response)

    @get(
        "/v1/responses/{response_id:str}/input_items",
        operation_id="listInputItems",
        operation_class=documented,
        summary="List what a stored response was made of",
        tags=["Responses"],
    )
    async def input_items(
        request: AnyRequest,
        response_id: FromPath[str],
        limit: Limit = 20,
        order: Order = "desc",
        after: After = None,
    ) -> Response[bytes]:
        items = (await stored(request, response_id)).items
        if order == "desc":
            items.reverse()
        return _json(msgspec.json.encode(_page(items, limit, after)))

    @delete(
        "/v1/responses/{response_id:str}",
        status_code=200,
        operation_id="deleteResponse",
        operation_class=documented,
        summary="Delete a stored response",
        tags=["Responses"],
    )
    async def remove(request: AnyRequest, response_id: FromPath[str]) -> Deleted:
        principal = await caller(request)
        try:
            found = await store.delete(principal.tenant_id, response_id)
        except DatabaseUnavailable as fault:
            raise services_away() from fault
        if not found:
            raise _not_found(response_id)
        return Deleted(response_id)

    @post(
        "/v1/responses/{response_id:str}/cancel",
        status_code=200,
        operation_id="cancelResponse",
        operation_class=documented,
        summary="Refused: no response runs in the background",
        tags=["Responses"],
    )
    async def cancel(request: AnyRequest, response_id: FromPath[str]) -> None:
        await stored(request, response_id)
        raise bad_request(
            "Only responses that run in the background can be cancelled, and none does here. To stop a stream, close "
            "its connection.",
            param="response_id",
        )

    return [read, input_items, remove, cancel]


def _page(items: list[msgspec.Raw], limit: int, after: str | None) -> InputItems:
    begin = 0
    if after is not None:
        before = next((index for index, item in enumerate(items) if id_of(item) == after), None)
        if before is None:
            raise bad_request("'after' must be the id of one of the items.", param="after")
        begin = before + 1
    shown = items[begin : begin + limit]
    return InputItems(
        shown,
        first_id=id_of(shown[0]) if shown else None,
        last_id=id_of(shown[-1]) if shown else None,
        has_more=begin + limit < len(items),
    )


def _json(body: bytes | msgspec.Raw) -> Response[bytes]:
    return Response(bytes(body), media_type=JSON)


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:100]!r} not found. It may have expired, been deleted, or not been stored.",
        param="response_id",
        code="response_not_found",
    )
