"""``/internal/v1/workers/{id}``: workers join and leave the fleet, under the fleet token."""

from __future__ import annotations

import hmac
import re
from typing import Annotated, Any

import msgspec
from litestar import Request, delete, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter
from yarl import URL

from gateway.http.client import bearer
from gateway.http.errors import Problem
from gateway.routing.registry import Registry
from gateway.tenants.catalog import Catalog
from worker.protocol.fleet import Registered, WorkerRecord

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_URL = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+(:\d{1,5})?", re.ASCII)
_decoder = msgspec.json.Decoder(WorkerRecord)
_BODY_LIMIT = 64 * 1024

WorkerId = Annotated[str, PathParameter(description="The worker's own id; it stays the same while the worker runs.")]


def fleet_handlers(registry: Registry, catalog: Catalog, *, fleet_token: str | None) -> list[HTTPRouteHandler]:
    def check(request: Request[Any, Any, Any]) -> None:
        given = bearer(request.headers.get("authorization")) or ""
        if fleet_token is None or not hmac.compare_digest(given.encode(), fleet_token.encode()):
            raise Problem(401, "Send the fleet token as a bearer token.", headers={"www-authenticate": "Bearer"})

    @put(
        "/internal/v1/workers/{worker_id:str}",
        request_max_body_size=_BODY_LIMIT,
        operation_id="registerWorker",
        summary="Register a worker, or say that it still lives",
        tags=["Fleet"],
    )
    async def register(request: Request[Any, Any, Any], worker_id: WorkerId) -> Registered:
        check(request)
        record = _record(await request.body(), worker_id)
        if not await catalog.knows_pool(record.pool):
            raise Problem(404, f"There is no pool {record.pool[:100]!r}. Declare it: `penstock pool set`.")
        await registry.register(record)
        return Registered(ttl_s=registry.ttl_s)

    @delete(
        "/internal/v1/workers/{worker_id:str}",
        operation_id="withdrawWorker",
        summary="Withdraw a worker",
        tags=["Fleet"],
    )
    async def withdraw(request: Request[Any, Any, Any], worker_id: WorkerId) -> None:
        check(request)
        await registry.withdraw(worker_id)

    return [register, withdraw]


def _record(body: bytes, worker_id: str) -> WorkerRecord:
    try:
        record = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise Problem(400, f"The body is not a worker's record: {fault}.") from None
    if record.worker_id != worker_id or not _ID.fullmatch(worker_id):
        raise Problem(400, "'worker_id' must be the id in the path: letters, digits and . _ : - only.")
    if not _is_base_url(record.base_url):
        raise Problem(400, "'base_url' must be http(s)://host:port, without a path.")
    if record.context_length < 1:
        raise Problem(400, "'context_length' must be at least 1.")
    return record


def _is_base_url(text: str) -> bool:
    try:
        return _URL.fullmatch(text) is not None and bool(URL(text).port)
    except ValueError:
        return False
