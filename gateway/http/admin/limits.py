"""``/tenants/{tenant}/limits``: the most that a tenant, a project, a key, an end user or a model may take."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, PathParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.billing.usage import USD_PATTERN, usd_text
from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    Body,
    IfMatch,
    Page,
    PageSize,
    TenantRef,
    documented,
    expected_version,
    page_behind,
    page_of,
    single,
)
from gateway.http.errors import Problem
from gateway.tenants.directory import Directory
from gateway.tenants.limit_amount import limit_amount, required_amount
from gateway.tenants.principal import Metric, Subject
from gateway.tenants.records import LimitRecord
from gateway.tenants.specs import LimitChange, LimitSpec

Window = Literal["minute", "hour", "day", "week", "month", "total"]
LimitRef = Annotated[str, PathParameter(description="Id of the limit.")]
Amount = Annotated[int, Meta(ge=0, le=10**12, description="Requests, tokens or slots; not for a budget.")]
Usd = Annotated[str, Meta(pattern=f"^{USD_PATTERN}$", description="Of a budget, in USD: `12.50`; never a number.")]
Target = Annotated[
    str,
    Meta(
        max_length=1000,
        description="Whose: a project's name or id, a key's public id, a route's name, an end user as clients name it. "
        "Empty: the whole tenant, or each end user apart.",
    ),
]
Thresholds = Annotated[
    list[Annotated[int, Meta(ge=1, le=1000)]],
    Meta(max_length=20, description="Of a budget: percentages whose crossing is told."),
]


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    tenant_id: UUID
    subject: Subject
    target: str
    """A project's id, a key's public id, a route's name, an end user's keyed hash, or empty."""
    metric: Metric
    window: Window | None
    amount: int
    """Requests, tokens, slots, or nano-USD of a budget."""
    amount_usd: str | None
    """The budget in USD, all nine decimal places."""
    hard: bool
    """False: over it nothing is refused, only told."""
    thresholds: list[int]
    created_at: datetime
    version: int
    """As in the ``ETag``."""


class NewLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant has one at most of each subject, target, metric and window."""

    subject: Subject = "tenant"
    target: Target = ""
    metric: Metric
    window: Window | None = None
    """minute, hour or day for requests and tokens; day, week, month or total for a budget; null for concurrent."""
    amount: Amount | UnsetType = UNSET
    amount_usd: Usd | UnsetType = UNSET
    hard: bool = True
    thresholds: Thresholds = []


class LimitPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays."""

    amount: Amount | UnsetType = UNSET
    amount_usd: Usd | UnsetType = UNSET
    hard: bool | UnsetType = UNSET
    thresholds: Thresholds | UnsetType = UNSET


_EXAMPLE = {"metric": "budget", "window": "month", "amount_usd": "12.50", "thresholds": [80, 100]}


def limit_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    @get(
        "/tenants/{tenant:str}/limits",
        operation_id="listLimits",
        operation_class=documented(404),
        summary="List a tenant's limits",
    )
    async def list_(tenant: TenantRef, limit: PageSize = 100, after: After = None) -> Page[Limit]:
        found = page_behind(await directory.list_limits(tenant), after, limit, _cursor)
        shown, following = page_of(found, limit, _cursor)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/tenants/{tenant:str}/limits",
        role="admin",
        dto=Body[NewLimit],
        return_dto=None,
        operation_id="createLimit",
        operation_class=documented(403, 404, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Set a limit",
    )
    async def create(request: AnyRequest, tenant: TenantRef, data: JSONBody[NewLimit]) -> Response[Limit]:
        spec = LimitSpec(
            subject=data.subject,
            target=_stored_target(data.target),
            metric=data.metric,
            window=data.window,
            amount=required_amount(data.metric, data.amount, data.amount_usd),
            hard=data.hard,
            thresholds=tuple(data.thresholds),
        )
        record = await directory.create_limit(actor_of(request), tenant, spec)
        path = f"/tenants/{record.tenant_id}/limits/{record.id}"
        return single(_shown(record), record.version, created_at=path)

    @get(
        "/tenants/{tenant:str}/limits/{limit_id:str}",
        operation_id="retrieveLimit",
        operation_class=documented(404, tagged=True),
        summary="Show a limit",
    )
    async def retrieve(tenant: TenantRef, limit_id: LimitRef) -> Response[Limit]:
        record = await directory.limit(tenant, limit_id)
        return single(_shown(record), record.version)

    @patch(
        "/tenants/{tenant:str}/limits/{limit_id:str}",
        role="admin",
        dto=Body[LimitPatch],
        return_dto=None,
        operation_id="updateLimit",
        operation_class=documented(403, 404, 409, 412, example={"amount_usd": "25"}, tagged=True),
        summary="Change a limit",
    )
    async def update(
        request: AnyRequest, tenant: TenantRef, limit_id: LimitRef, data: JSONBody[LimitPatch], if_match: IfMatch = None
    ) -> Response[Limit]:
        metric = (await directory.limit(tenant, limit_id)).metric
        change = LimitChange(
            amount=limit_amount(metric, data.amount, data.amount_usd),
            hard=data.hard,
            thresholds=data.thresholds if data.thresholds is UNSET else tuple(data.thresholds),
        )
        version = expected_version(if_match)
        record = await directory.update_limit(actor_of(request), tenant, limit_id, change, if_version=version)
        return single(_shown(record), record.version)

    @delete(
        "/tenants/{tenant:str}/limits/{limit_id:str}",
        role="admin",
        operation_id="deleteLimit",
        operation_class=documented(403, 404, 409, 412),
        summary="Lift a limit",
    )
    async def lift(request: AnyRequest, tenant: TenantRef, limit_id: LimitRef, if_match: IfMatch = None) -> None:
        await directory.delete_limit(actor_of(request), tenant, limit_id, if_version=expected_version(if_match))

    return [list_, create, retrieve, update, lift]


def _stored_target(target: str) -> str:
    if "\x00" in target:
        raise Problem(400, "target: it must not contain a NUL character.", field="target")
    return target


def _cursor(record: LimitRecord) -> str:
    return str(record.id)


def _shown(record: LimitRecord) -> Limit:
    values: dict[str, Any] = {name: getattr(record, name) for name in record.__slots__}
    values["thresholds"] = list(record.thresholds)
    return Limit(**values, amount_usd=usd_text(record.amount) if record.metric == "budget" else None)
