"""``/tenants/{tenant}/keys``: what tenants' programs call with. A secret is told once, when it is made."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
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
from gateway.tenants.directory import Directory
from gateway.tenants.principal import Scope
from gateway.tenants.records import KeyRecord
from gateway.tenants.specs import MAX_GRACE_S, KeyChange
from gateway.tenants.tenant_changes import DEFAULT_PROJECT

KeyRef = Annotated[str, PathParameter(description="Public id of the key.")]
ProjectFilter = Annotated[str | None, QueryParameter(description="Only keys of this project, by name or id.")]
Scopes = Annotated[tuple[Scope, ...], Meta(min_length=1, description="What it may do.")]
Models = Annotated[tuple[Name, ...], Meta(max_length=1000, description="Routes it may ask for; null: every one.")]
Cap = Annotated[int, Meta(ge=1, le=100_000_000, description="Tokens; null: the route's own cap.")]
Expiry = Annotated[datetime, Meta(tz=True, description="When it ends, in the future; null: never.")]
Grace = Annotated[float, Meta(ge=0, le=MAX_GRACE_S, description="For how many seconds the secret before is good, too.")]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The key's public part, by which it is named everywhere."""
    tenant_id: UUID
    project_id: UUID
    project: str
    name: str
    scopes: list[str]
    allowed_models: list[str] | None
    """Null: every route."""
    max_context_tokens: int | None
    max_output_tokens: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_until: datetime | None
    """Until then the secret before the last rotation is good, too."""
    version: int
    """As in the ``ETag``."""


class KeyWithSecret(Key, frozen=True, kw_only=True):
    secret: str
    """What is sent as bearer token. Only its hash is kept: it is not told again."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    project: Name = DEFAULT_PROJECT
    """Name or id."""
    scopes: Scopes = ("inference",)
    allowed_models: Models | None = None
    max_context_tokens: Cap | None = None
    max_output_tokens: Cap | None = None
    expires_at: Expiry | None = None


class KeyPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays."""

    name: Name | UnsetType = UNSET
    scopes: Scopes | UnsetType = UNSET
    allowed_models: Models | UnsetType | None = UNSET
    max_context_tokens: Cap | UnsetType | None = UNSET
    max_output_tokens: Cap | UnsetType | None = UNSET
    expires_at: Expiry | UnsetType | None = UNSET


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: Grace = 0.0


_EXAMPLE = {"name": "production", "scopes": ["inference"], "max_output_tokens": 1000}


def key_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    @get(
        "/tenants/{tenant:str}/keys",
        operation_id="listKeys",
        operation_class=documented(404),
        summary="List a tenant's keys, oldest first",
    )
    async def list_(
        tenant: TenantRef, project: ProjectFilter = None, limit: PageSize = 100, after: After = None
    ) -> Page[Key]:
        found = await directory.list_keys(tenant, project, after=name_cursor(after), limit=limit + 1)
        shown, following = page_of(found, limit, lambda record: record.public_id)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/tenants/{tenant:str}/keys",
        role="admin",
        dto=Body[NewKey],
        return_dto=None,
        operation_id="createKey",
        operation_class=documented(403, 404, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Issue a key; its secret is told this once",
    )
    async def create(request: AnyRequest, tenant: TenantRef, data: JSONBody[NewKey]) -> Response[KeyWithSecret]:
        text, record = await directory.create_key(
            actor_of(request),
            tenant,
            data.name,
            project=data.project,
            scopes=data.scopes,
            allowed_models=data.allowed_models,
            max_context_tokens=data.max_context_tokens,
            max_output_tokens=data.max_output_tokens,
            expires_at=data.expires_at,
        )
        path = f"/tenants/{record.tenant_id}/keys/{record.public_id}"
        return single(_with_secret(record, text), record.version, created_at=path, secret=True)

    @get(
        "/tenants/{tenant:str}/keys/{key:str}",
        operation_id="retrieveKey",
        operation_class=documented(404, tagged=True),
        summary="Show a key, without its secret",
    )
    async def retrieve(tenant: TenantRef, key: KeyRef) -> Response[Key]:
        record = await directory.key(key, tenant)
        return single(_shown(record), record.version)

    @patch(
        "/tenants/{tenant:str}/keys/{key:str}",
        role="admin",
        dto=Body[KeyPatch],
        return_dto=None,
        operation_id="updateKey",
        operation_class=documented(403, 404, 409, 412, example={"max_output_tokens": 500}, tagged=True),
        summary="Change a key",
    )
    async def update(
        request: AnyRequest, tenant: TenantRef, key: KeyRef, data: JSONBody[KeyPatch], if_match: IfMatch = None
    ) -> Response[Key]:
        record = await directory.update_key(
            actor_of(request),
            key,
            _change(data),
            if_version=expected_version(if_match),
            tenant=tenant,
        )
        return single(_shown(record), record.version)

    @post(
        "/tenants/{tenant:str}/keys/{key:str}/rotate",
        role="admin",
        status_code=200,
        dto=Body[Rotation],
        return_dto=None,
        operation_id="rotateKey",
        operation_class=documented(403, 404, 409, 412, example={"grace_s": 3600}, tagged=True),
        summary="Give a key another secret, which is told this once",
    )
    async def rotate(
        request: AnyRequest, tenant: TenantRef, key: KeyRef, data: JSONBody[Rotation], if_match: IfMatch = None
    ) -> Response[KeyWithSecret]:
        text, record = await directory.rotate_key(
            actor_of(request),
            key,
            grace_s=data.grace_s,
            if_version=expected_version(if_match),
            tenant=tenant,
        )
        return single(_with_secret(record, text), record.version, secret=True)

    @delete(
        "/tenants/{tenant:str}/keys/{key:str}",
        role="admin",
        status_code=200,
        operation_id="revokeKey",
        operation_class=documented(403, 404, 409, 412, tagged=True),
        summary="Revoke a key",
    )
    async def revoke(request: AnyRequest, tenant: TenantRef, key: KeyRef, if_match: IfMatch = None) -> Response[Key]:
        version = expected_version(if_match)
        record = await directory.revoke_key(actor_of(request), key, if_version=version, tenant=tenant)
        return single(_shown(record), record.version)

    return [list_, create, retrieve, update, rotate, revoke]


def _change(patch: KeyPatch) -> KeyChange:
    values = given(patch)
    for name in ("scopes", "allowed_models"):
        if values.get(name) is not None:
            values[name] = frozenset(values[name])
    return KeyChange(**values)


def _values(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.public_id,
        "tenant_id": record.tenant_id,
        "project_id": record.project_id,
        "project": record.project_name,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "allowed_models": None if record.allowed_models is None else sorted(record.allowed_models),
        "max_context_tokens": record.max_context_tokens,
        "max_output_tokens": record.max_output_tokens,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "previous_until": record.previous_until,
        "version": record.version,
    }


def _shown(record: KeyRecord) -> Key:
    return Key(**_values(record))  # type: ignore[arg-type]


def _with_secret(record: KeyRecord, text: str) -> KeyWithSecret:
    return KeyWithSecret(**_values(record), secret=text)  # type: ignore[arg-type]
