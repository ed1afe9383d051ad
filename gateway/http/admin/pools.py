"""``/pools``: groups of backends that serve routes. A pool is a name and never changes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter

from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    Body,
    IfMatch,
    Name,
    Page,
    PageSize,
    check_immutable,
    documented,
    name_cursor,
    page_of,
    single,
)
from gateway.tenants.catalog import Catalog, UnknownPool
from gateway.tenants.records import AlreadyExists

PoolName = Annotated[
    str, PathParameter(description="Name of the pool.", examples=[Example(summary="A name", value="smollm2")])
]


class Pool(msgspec.Struct, frozen=True):
    name: str


class NewPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


def pool_handlers(catalog: Catalog) -> list[HTTPRouteHandler]:
    async def find(path: str) -> str:
        name = path.removeprefix("/")
        if name not in await catalog.pools():
            raise UnknownPool(name)
        return name

    @get("/pools", operation_id="listPools", operation_class=documented(), summary="List pools, by name")
    async def list_(limit: PageSize = 100, after: After = None) -> Page[Pool]:
        begin = name_cursor(after) or ""
        found = [name for name in sorted(await catalog.pools()) if name > begin]
        shown, following = page_of(found, limit, lambda name: name)
        return Page([Pool(name) for name in shown], following)

    @post(
        "/pools",
        role="admin",
        dto=Body[NewPool],
        return_dto=None,
        operation_id="createPool",
        operation_class=documented(403, 409, example={"name": "large"}, tagged=True, created=True),
        summary="Declare a pool",
    )
    async def create(request: AnyRequest, data: JSONBody[NewPool]) -> Response[Pool]:
        if not await catalog.create_pool(actor_of(request), data.name):
            raise AlreadyExists(f"there is a pool {data.name!r} already; choose another name")
        return single(Pool(data.name), 1, created_at=f"/pools/{data.name}")

    @get(
        "/pools/{pool:path}",
        operation_id="retrievePool",
        operation_class=documented(404, tagged=True),
        summary="Show a pool",
    )
    async def retrieve(pool: PoolName) -> Response[Pool]:
        return single(Pool(await find(pool)), 1)

    @delete(
        "/pools/{pool:path}",
        role="admin",
        operation_id="deletePool",
        operation_class=documented(403, 404, 409, 412),
        summary="Delete a pool that no route and no backend uses",
    )
    async def remove(request: AnyRequest, pool: PoolName, if_match: IfMatch = None) -> None:
        name = await find(pool)
        check_immutable("pool", name, if_match)
        await catalog.delete_pool(actor_of(request), name)

    return [list_, create, retrieve, remove]
