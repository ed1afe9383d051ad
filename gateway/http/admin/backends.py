"""``/backends``: servers that were declared, with their secrets, which no answer shows."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.backends.brands import BRANDS
from gateway.backends.trial import Step, Trials
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
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import (
    MAX_CONNECT_S,
    MAX_CONTEXT_LENGTH,
    MAX_HEADERS,
    MAX_PRIORITY,
    MAX_SECRET,
    MAX_URL,
    MAX_WEIGHT,
    BackendChange,
    BackendRecord,
    BackendSpec,
)
from gateway.tenants.principal import LONGEST_REQUEST_S
from gateway.tenants.records import MAX_NAME

BackendName = Annotated[
    str, PathParameter(description="Name of the backend.", examples=[Example(summary="A name", value="openai-eu")])
]
OfPool = Annotated[str | None, QueryParameter(description="Only those of this pool.")]
OwnName = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        max_length=MAX_NAME,
        description="1 to 100 letters, digits and . _ - :, beginning with a letter or digit. It stands in "
        "`x-penstock-backend` and in usage rows.",
    ),
]
BrandName = Annotated[
    str,
    Meta(
        description="Whose server it is: "
        + ", ".join(sorted(name for name, brand in BRANDS.items() if brand.family != "penstock"))
        + "; `generic` is any that speaks OpenAI's API."
    ),
]
BaseUrl = Annotated[
    str,
    Meta(
        max_length=MAX_URL,
        description="http(s)://host, with a path where one comes before the API's own (Google: /v1beta/openai). A "
        "/v1 at its end is left out.",
    ),
]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_SECRET, description="Sealed at rest; no answer shows it.")]
Headers = Annotated[
    dict[str, str],
    Meta(
        max_length=MAX_HEADERS,
        description="Sent with each request, beside the key. Sealed at rest; answers show their names.",
    ),
]
Context = Annotated[int, Meta(ge=1, le=MAX_CONTEXT_LENGTH, description="Most tokens of prompt and output together.")]
Weight = Annotated[
    float,
    Meta(ge=0, le=MAX_WEIGHT, description="Share beside others of its pool and priority; 0: only if no other is left."),
]
Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY, description="Lower first.")]
ConnectSeconds = Annotated[float, Meta(gt=0, le=MAX_CONNECT_S)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_REQUEST_S)]


class BackendView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pool: str
    brand: str
    base_url: str
    has_api_key: bool
    header_names: tuple[str, ...]
    model: str | None
    """What is sent as the model's name; null: the target's."""
    context_length: int
    weight: float
    priority: int
    connect_timeout_s: float | None
    """Null: as the gateway's settings have it; so the other two."""
    first_byte_timeout_s: float | None
    idle_timeout_s: float | None
    enabled: bool
    version: int
    """As in the ``ETag``."""
    created_at: datetime


class NewBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: OwnName
    pool: Name
    brand: BrandName
    base_url: BaseUrl
    api_key: Key | None = None
    headers: Headers = {}
    model: Name | None = None
    context_length: Context | None = None
    """Null: what is usual for its brand."""
    weight: Weight = 1.0
    priority: Priority = 0
    connect_timeout_s: ConnectSeconds | None = None
    first_byte_timeout_s: Seconds | None = None
    idle_timeout_s: Seconds | None = None
    enabled: bool = True


class BackendPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; ``headers`` takes the place of all. With another host give the secrets anew."""

    pool: Name | UnsetType = UNSET
    brand: BrandName | UnsetType = UNSET
    base_url: BaseUrl | UnsetType = UNSET
    api_key: Key | UnsetType | None = UNSET
    headers: Headers | UnsetType = UNSET
    model: Name | UnsetType | None = UNSET
    context_length: Context | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET
    connect_timeout_s: ConnectSeconds | UnsetType | None = UNSET
    first_byte_timeout_s: Seconds | UnsetType | None = UNSET
    idle_timeout_s: Seconds | UnsetType | None = UNSET
    enabled: bool | UnsetType = UNSET


class NewTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Name | None = None
    """What to ask for. Null: the backend's own `model`, else the first that it lists."""
    embeddings: bool = False
    """Ask for an embedding, too."""


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    passed: bool
    steps: list[Step]


_EXAMPLE = {
    "name": "openai-eu",
    "pool": "pool",
    "brand": "openai",
    "base_url": "https://api.openai.com",
    "api_key": "sk-...",
    "context_length": 400_000,
}


def backend_handlers(backends: BackendChanges, trials: Trials) -> list[HTTPRouteHandler]:
    @get("/backends", operation_id="listBackends", operation_class=documented(), summary="List backends, by name")
    async def list_(pool: OfPool = None, limit: PageSize = 100, after: After = None) -> Page[BackendView]:
        found = await backends.list_backends(pool=pool, after=name_cursor(after), limit=limit + 1)
        shown, following = page_of(found, limit, lambda record: record.name)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/backends",
        role="admin",
        dto=Body[NewBackend],
        return_dto=None,
        operation_id="createBackend",
        operation_class=documented(403, 404, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Declare a backend; every replica uses it within 5 s",
    )
    async def create(request: AnyRequest, data: JSONBody[NewBackend]) -> Response[BackendView]:
        record = await backends.create_backend(actor_of(request), BackendSpec(**msgspec.structs.asdict(data)))
        return single(_shown(record), record.version, created_at=f"/backends/{record.name}")

    @get(
        "/backends/{backend:str}",
        operation_id="retrieveBackend",
        operation_class=documented(404, tagged=True),
        summary="Show a backend",
    )
    async def retrieve(backend: BackendName) -> Response[BackendView]:
        found = await backends.backend(backend)
        return single(_shown(found), found.version)

    @patch(
        "/backends/{backend:str}",
        role="admin",
        dto=Body[BackendPatch],
        return_dto=None,
        operation_id="updateBackend",
        operation_class=documented(403, 404, 409, 412, example={"weight": 2}, tagged=True),
        summary="Change a backend",
    )
    async def update(
        request: AnyRequest, backend: BackendName, data: JSONBody[BackendPatch], if_match: IfMatch = None
    ) -> Response[BackendView]:
        change, version = BackendChange(**given(data)), expected_version(if_match)
        changed = await backends.update_backend(actor_of(request), backend, change, if_version=version)
        return single(_shown(changed), changed.version)

    @delete(
        "/backends/{backend:str}",
        role="admin",
        operation_id="deleteBackend",
        operation_class=documented(403, 404, 412),
        summary="Delete a backend; requests that it is answering go on",
    )
    async def remove(request: AnyRequest, backend: BackendName, if_match: IfMatch = None) -> None:
        await backends.delete_backend(actor_of(request), backend, if_version=expected_version(if_match))

    @post(
        "/backends/{backend:str}/test",
        role="admin",
        status_code=200,
        dto=Body[NewTrial],
        return_dto=None,
        operation_id="testBackend",
        operation_class=documented(403, 404, 409, example={"model": "gpt-5-mini"}),
        summary="Try a backend from this gateway, step by step; it is asked for a few tokens",
    )
    async def try_(backend: BackendName, data: JSONBody[NewTrial]) -> TrialView:
        endpoint = await backends.endpoint(backend)
        steps = [step async for step in trials.steps(endpoint, model=data.model, embeddings=data.embeddings)]
        return TrialView(passed=all(step.passed for step in steps), steps=steps)

    return [list_, create, retrieve, update, remove, try_]


def _shown(record: BackendRecord) -> BackendView:
    return BackendView(**asdict(record))
