"""``/tenants``: who may be served, and on which terms."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody
from msgspec import UNSET, Meta, UnsetType

from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    Archived,
    Body,
    IfMatch,
    Name,
    Page,
    PageSize,
    TenantRef,
    documented,
    expected_version,
    given,
    name_cursor,
    page_of,
    single,
)
from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.tenants.directory import Directory
from gateway.tenants.principal import RedisLossPolicy
from gateway.tenants.records import TenantRecord
from gateway.tenants.specs import TenantChange, TenantSettings

Timezone = Annotated[str, Meta(max_length=100, description="IANA name; budget periods begin at its midnights.")]
Markup = Annotated[
    int, Meta(ge=-10_000, le=1_000_000, description="Hundredths of a percent, added to list prices: 2000 is 20 %.")
]
Weight = Annotated[float, Meta(ge=0.01, le=1000, description="Share among tenants of a worker's fair queue.")]
WebhookUrl = Annotated[str, Meta(max_length=2000, description="Where crossed thresholds of budgets are told.")]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    timezone: str
    redis_loss: RedisLossPolicy
    markup_bp: int
    """Hundredths of a percent, added to list prices."""
    weight: float
    webhook_url: str | None
    created_at: datetime
    archived_at: datetime | None
    """Since then its keys are invalid."""
    version: int
    """As in the ``ETag``."""
    webhook_secret: str | UnsetType = UNSET
    """Signs what is sent to the webhook: only in the answer to the change that set its URL."""
    answer_cache: CachePolicy
    """Only what differs from the usual."""
    prompt_log: PromptLogPolicy


class NewTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    timezone: Timezone = "UTC"
    redis_loss: RedisLossPolicy = "fail_closed"
    """While Redis is away: refuse requests, or serve them unchecked and account for them when it is back."""
    markup_bp: Markup = 0
    weight: Weight = 1.0
    webhook_url: WebhookUrl | None = None
    answer_cache: CachePolicy = NO_POLICY
    prompt_log: PromptLogPolicy = NO_LOG


class TenantPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays. A new webhook URL gets a new secret. A policy takes the place of all that it was."""

    name: Name | UnsetType = UNSET
    timezone: Timezone | UnsetType = UNSET
    redis_loss: RedisLossPolicy | UnsetType = UNSET
    markup_bp: Markup | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    webhook_url: WebhookUrl | UnsetType | None = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET
    prompt_log: PromptLogPolicy | UnsetType = UNSET


_EXAMPLE = {"name": "acme", "timezone": "Europe/Berlin", "markup_bp": 2000}


def tenant_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    @get("/tenants", operation_id="listTenants", operation_class=documented(), summary="List tenants, by name")
    async def list_(limit: PageSize = 100, after: After = None, archived: Archived = False) -> Page[Tenant]:
        found = await directory.list_tenants(after=name_cursor(after), limit=limit + 1, archived=archived)
        shown, following = page_of(found, limit, lambda record: record.name)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/tenants",
        role="admin",
        dto=Body[NewTenant],
        return_dto=None,
        operation_id="createTenant",
        operation_class=documented(403, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Create a tenant, with a project `default`",
    )
    async def create(request: AnyRequest, data: JSONBody[NewTenant]) -> Response[Tenant]:
        values: dict[str, Any] = msgspec.structs.asdict(data)
        name = values.pop("name")
        record = await directory.create_tenant(actor_of(request), name, settings=TenantSettings(**values))
        return single(_shown(record), record.version, created_at=f"/tenants/{record.id}", secret=True)

    @get(
        "/tenants/{tenant:str}",
        operation_id="retrieveTenant",
        operation_class=documented(404, tagged=True),
        summary="Show a tenant",
    )
    async def retrieve(tenant: TenantRef) -> Response[Tenant]:
        record = await directory.tenant(tenant)
        return single(_shown(record), record.version)

    @patch(
        "/tenants/{tenant:str}",
        role="admin",
        dto=Body[TenantPatch],
        return_dto=None,
        operation_id="updateTenant",
        operation_class=documented(403, 404, 409, 412, example={"weight": 2}, tagged=True),
        summary="Change a tenant",
    )
    async def update(
        request: AnyRequest, tenant: TenantRef, data: JSONBody[TenantPatch], if_match: IfMatch = None
    ) -> Response[Tenant]:
        record = await directory.update_tenant(
            actor_of(request), tenant, TenantChange(**given(data)), if_version=expected_version(if_match)
        )
        return single(_shown(record), record.version, secret=record.webhook_secret is not None)

    @delete(
        "/tenants/{tenant:str}",
        role="admin",
        status_code=200,
        operation_id="archiveTenant",
        operation_class=documented(403, 404, 409, 412, tagged=True),
        summary="Archive a tenant: its keys are invalid from now on",
    )
    async def archive(request: AnyRequest, tenant: TenantRef, if_match: IfMatch = None) -> Response[Tenant]:
        record = await directory.archive_tenant(actor_of(request), tenant, if_version=expected_version(if_match))
        return single(_shown(record), record.version)

    return [list_, create, retrieve, update, archive]


def _shown(record: TenantRecord) -> Tenant:
    values = asdict(record)
    del values["generation"]
    if record.webhook_secret is None:
        values["webhook_secret"] = UNSET
    return Tenant(**values)
