"""``/routes``: the models that tenants can ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    Body,
    IfMatch,
    Name,
    Page,
    PageSize,
    documented,
    expected_version,
    given,
    name_cursor,
    page_of,
    single,
)
from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.routing.route import DEFAULT_TIMEOUT_S, Route, Target, UnpricedPolicy, new_route
from gateway.tenants.catalog import MAX_PRIORITY, MAX_TARGETS, MAX_WEIGHT, Catalog, RouteChange
from gateway.tenants.principal import LONGEST_REQUEST_S

RouteName = Annotated[
    str,
    PathParameter(
        description="Name of the route.", examples=[Example(summary="A name", value="smollm2-135m-instruct")]
    ),
]
Tokens = Annotated[int, Meta(ge=1, le=100_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_REQUEST_S, description="Wall-clock limit of one request.")]
Tokenizer = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9_]{1,50}$",
        description="Encoding that counts prompts, as o200k_base, or `backend`; null: bounded by their bytes.",
    ),
]


Weight = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_WEIGHT,
        description="Share of the requests beside targets of the same priority; 0: only if no other is left.",
    ),
]
Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY, description="Lower first; the next only where none can be used.")]


class NewTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool that serves the route, too."""

    pool: Name
    backend_model: Name
    weight: Weight = 1.0
    priority: Priority = 0


Targets = Annotated[
    list[NewTarget],
    Meta(max_length=MAX_TARGETS - 1, description="Beside the first, which `pool` and `backend_model` name."),
]


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """What tenants put in ``model``."""
    pool: str
    backend_model: str
    """What is sent to the backend as ``model``."""
    context_length: int
    default_output_tokens: int
    max_output_tokens: int
    timeout_s: float
    unpriced: UnpricedPolicy
    tokenizer: str | None
    weight: float
    """Of the target that ``pool`` and ``backend_model`` name."""
    priority: int
    more_targets: tuple[Target, ...]
    """Beside that one."""
    version: int
    """As in the ``ETag``."""
    answer_cache: CachePolicy
    """Only what differs from what tenants and projects say."""


class NewRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    pool: Name
    context_length: Tokens
    """What tenants are told of prompt and output together. What is too long, backends refuse by their own."""
    backend_model: Name | None = None
    """Null: as the route."""
    default_output_tokens: Tokens | None = None
    """When a request names no cap. Null: 512, or the largest cap if that is less."""
    max_output_tokens: Tokens | None = None
    """Largest cap. Null: the context length."""
    timeout_s: Seconds = DEFAULT_TIMEOUT_S
    unpriced: UnpricedPolicy = "refuse"
    """While no price is in force: refuse requests, or serve them, charge nothing and mark their rows so."""
    tokenizer: Tokenizer | None = None
    weight: Weight = 1.0
    priority: Priority = 0
    more_targets: Targets = []
    answer_cache: CachePolicy = NO_POLICY


class RoutePatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; ``more_targets`` and ``answer_cache`` take the place of all that there was."""

    pool: Name | UnsetType = UNSET
    backend_model: Name | UnsetType = UNSET
    context_length: Tokens | UnsetType = UNSET
    default_output_tokens: Tokens | UnsetType = UNSET
    max_output_tokens: Tokens | UnsetType = UNSET
    timeout_s: Seconds | UnsetType = UNSET
    unpriced: UnpricedPolicy | UnsetType = UNSET
    tokenizer: Tokenizer | UnsetType | None = UNSET
    weight: Weight | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET
    more_targets: Targets | UnsetType = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET


_EXAMPLE = {"name": "small", "pool": "smollm2", "backend_model": "smollm2-135m-instruct", "context_length": 8192}


def route_handlers(catalog: Catalog) -> list[HTTPRouteHandler]:
    @get("/routes", operation_id="listRoutes", operation_class=documented(), summary="List routes, by name")
    async def list_(limit: PageSize = 100, after: After = None) -> Page[RouteView]:
        found = await catalog.list_routes(after=name_cursor(after), limit=limit + 1)
        shown, following = page_of(found, limit, lambda route: route.name)
        return Page([_shown(route) for route in shown], following)

    @post(
        "/routes",
        role="admin",
        dto=Body[NewRoute],
        return_dto=None,
        operation_id="createRoute",
        operation_class=documented(403, 404, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Declare a route",
    )
    async def create(request: AnyRequest, data: JSONBody[NewRoute]) -> Response[RouteView]:
        new = new_route(**(msgspec.structs.asdict(data) | {"more_targets": _targets(data.more_targets)}))
        route = await catalog.create_route(actor_of(request), new)
        return single(_shown(route), route.version, created_at=f"/routes/{route.name}")

    @get(
        "/routes/{route:path}",
        operation_id="retrieveRoute",
        operation_class=documented(404, tagged=True),
        summary="Show a route",
    )
    async def retrieve(route: RouteName) -> Response[RouteView]:
        found = await catalog.stored_route(route.removeprefix("/"))
        return single(_shown(found), found.version)

    @patch(
        "/routes/{route:path}",
        role="admin",
        dto=Body[RoutePatch],
        return_dto=None,
        operation_id="updateRoute",
        operation_class=documented(403, 404, 409, 412, example={"timeout_s": 120}, tagged=True),
        summary="Change a route",
    )
    async def update(
        request: AnyRequest, route: RouteName, data: JSONBody[RoutePatch], if_match: IfMatch = None
    ) -> Response[RouteView]:
        values, version = given(data), expected_version(if_match)
        if "more_targets" in values:
            values["more_targets"] = _targets(values["more_targets"])
        change = RouteChange(**values)
        changed = await catalog.update_route(actor_of(request), route.removeprefix("/"), change, if_version=version)
        return single(_shown(changed), changed.version)

    @delete(
        "/routes/{route:path}",
        role="admin",
        operation_id="deleteRoute",
        operation_class=documented(403, 404, 412),
        summary="Delete a route; its prices and what was charged stay on record",
    )
    async def remove(request: AnyRequest, route: RouteName, if_match: IfMatch = None) -> None:
        name, version = route.removeprefix("/"), expected_version(if_match)
        await catalog.delete_route(actor_of(request), name, if_version=version)

    return [list_, create, retrieve, update, remove]


def _targets(targets: Sequence[NewTarget]) -> tuple[Target, ...]:
    return tuple(Target(**msgspec.structs.asdict(target)) for target in targets)


def _shown(route: Route) -> RouteView:
    return RouteView(**{field: getattr(route, field) for field in Route.__dataclass_fields__})
