"""``/admin-keys``: keys of administrators. Everybody may see who there is; only owners change them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, PathParameter
from msgspec import UNSET, UnsetType

from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.keys import Expiry, Rotation
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
from gateway.tenants.directory import Directory
from gateway.tenants.principal import AdminRole
from gateway.tenants.records import KeyRecord, UnknownKey
from gateway.tenants.specs import KeyChange

KeyRef = Annotated[str, PathParameter(description="Public id of the key; `GET /admin/v1/whoami` tells one's own.")]


class AdminKey(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The key's public part: the audit log names it as the actor."""
    name: str
    role: AdminRole
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_until: datetime | None
    """Until then the secret before the last rotation is good, too."""
    version: int
    """As in the ``ETag``."""


class AdminKeyWithSecret(AdminKey, frozen=True, kw_only=True):
    secret: str
    """What is sent as bearer token. Only its hash is kept: it is not told again."""


class NewAdminKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    role: AdminRole
    """owner: everything; admin: everything but administrators' keys; viewer: only reads."""
    expires_at: Expiry | None = None


class AdminKeyPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays. A role cannot be changed: issue another key."""

    name: Name | UnsetType = UNSET
    expires_at: Expiry | UnsetType | None = UNSET


def admin_key_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    async def find(key: str) -> KeyRecord:
        record = await directory.key(key)
        if record.role is None:  # a tenant's key is not to be found here
            raise UnknownKey(key)
        return record

    @get(
        "/admin-keys",
        operation_id="listAdminKeys",
        operation_class=documented(),
        summary="List administrators' keys, oldest first",
    )
    async def list_(limit: PageSize = 100, after: After = None) -> Page[AdminKey]:
        found = await directory.list_admin_keys(after=name_cursor(after), limit=limit + 1)
        shown, following = page_of(found, limit, lambda record: record.public_id)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/admin-keys",
        role="owner",
        dto=Body[NewAdminKey],
        return_dto=None,
        operation_id="createAdminKey",
        operation_class=documented(403, example={"name": "ops", "role": "viewer"}, tagged=True, created=True),
        summary="Issue an administrator's key; its secret is told this once",
    )
    async def create(request: AnyRequest, data: JSONBody[NewAdminKey]) -> Response[AdminKeyWithSecret]:
        text, record = await directory.create_admin_key(
            actor_of(request), data.name, role=data.role, expires_at=data.expires_at
        )
        path = f"/admin-keys/{record.public_id}"
        return single(_with_secret(record, text), record.version, created_at=path, secret=True)

    @get(
        "/admin-keys/{key:str}",
        operation_id="retrieveAdminKey",
        operation_class=documented(404, tagged=True),
        summary="Show an administrator's key, without its secret",
    )
    async def retrieve(key: KeyRef) -> Response[AdminKey]:
        record = await find(key)
        return single(_shown(record), record.version)

    @patch(
        "/admin-keys/{key:str}",
        role="owner",
        dto=Body[AdminKeyPatch],
        return_dto=None,
        operation_id="updateAdminKey",
        operation_class=documented(403, 404, 409, 412, example={"name": "ops"}, tagged=True),
        summary="Change an administrator's key",
    )
    async def update(
        request: AnyRequest, key: KeyRef, data: JSONBody[AdminKeyPatch], if_match: IfMatch = None
    ) -> Response[AdminKey]:
        await find(key)
        record = await directory.update_key(
            actor_of(request), key, KeyChange(**given(data)), if_version=expected_version(if_match)
        )
        return single(_shown(record), record.version)

    @post(
        "/admin-keys/{key:str}/rotate",
        role="owner",
        status_code=200,
        dto=Body[Rotation],
        return_dto=None,
        operation_id="rotateAdminKey",
        operation_class=documented(403, 404, 409, 412, example={"grace_s": 3600}, tagged=True),
        summary="Give an administrator's key another secret, which is told this once",
    )
    async def rotate(
        request: AnyRequest, key: KeyRef, data: JSONBody[Rotation], if_match: IfMatch = None
    ) -> Response[AdminKeyWithSecret]:
        await find(key)
        text, record = await directory.rotate_key(
            actor_of(request), key, grace_s=data.grace_s, if_version=expected_version(if_match)
        )
        return single(_with_secret(record, text), record.version, secret=True)

    @delete(
        "/admin-keys/{key:str}",
        role="owner",
        status_code=200,
        operation_id="revokeAdminKey",
        operation_class=documented(403, 404, 409, 412, tagged=True),
        summary="Revoke an administrator's key; the last owner's stays",
    )
    async def revoke(request: AnyRequest, key: KeyRef, if_match: IfMatch = None) -> Response[AdminKey]:
        await find(key)
        record = await directory.revoke_key(actor_of(request), key, if_version=expected_version(if_match))
        return single(_shown(record), record.version)

    return [list_, create, retrieve, update, rotate, revoke]


def _values(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.public_id,
        "name": record.name,
        "role": record.role,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "previous_until": record.previous_until,
        "version": record.version,
    }


def _shown(record: KeyRecord) -> AdminKey:
    return AdminKey(**_values(record))  # type: ignore[arg-type]


def _with_secret(record: KeyRecord, text: str) -> AdminKeyWithSecret:
    return AdminKeyWithSecret(**_values(record), secret=text)  # type: ignore[arg-type]
