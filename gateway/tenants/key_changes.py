"""Keys of tenants and of administrators: issued, changed, rotated, revoked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET
from sqlalchemy import Select, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.engine import transaction
from gateway.db.tables import api_keys, projects, tenants
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import Change, Changes, check_version, find_tenant
from gateway.tenants.keys import NewKey, generate_key, renew_key
from gateway.tenants.principal import AdminRole
from gateway.tenants.project_changes import find_project
from gateway.tenants.records import (
    ConfigurationError,
    KeyRecord,
    LastOwner,
    NotAllowed,
    StateConflict,
    UnknownKey,
    check_name,
    is_name,
)
from gateway.tenants.specs import (
    ROLES,
    KeyChange,
    check_cap,
    check_expiry,
    check_grace,
    check_names,
    check_page,
    check_scopes,
)
from gateway.tenants.tenant_changes import DEFAULT_PROJECT

# Without the hashes of secrets, which nobody needs to see.
_COLUMNS = (
    api_keys.c.public_id,
    api_keys.c.tenant_id,
    tenants.c.name.label("tenant_name"),
    api_keys.c.project_id,
    projects.c.name.label("project_name"),
    api_keys.c.name,
    api_keys.c.role,
    api_keys.c.scopes,
    api_keys.c.allowed_models,
    api_keys.c.max_context_tokens,
    api_keys.c.max_output_tokens,
    api_keys.c.version,
    api_keys.c.created_at,
    api_keys.c.expires_at,
    api_keys.c.revoked_at,
    api_keys.c.previous_until,
)


class KeyChanges(Changes):
    async def create_key(
        self,
        actor: Actor,
        tenant: str | UUID,
        name: str,
        *,
        project: str | UUID = DEFAULT_PROJECT,
        scopes: Collection[str] = frozenset({"inference"}),
        allowed_models: Collection[str] | None = None,
        max_context_tokens: int | None = None,
        max_output_tokens: int | None = None,
        expires_at: datetime | None = None,
    ) -> tuple[str, KeyRecord]:
        """The key's text, which nobody will see again, and its record.

        Raises UnknownTenant, UnknownProject, NotAllowed, ConfigurationError.
        """
        new = generate_key()
        values = {
            "name": check_name("key", name),
            "scopes": sorted(check_scopes(scopes)),
            "allowed_models": None if allowed_models is None else check_names("route", allowed_models),
            "max_context_tokens": check_cap("max_context_tokens", max_context_tokens),
            "max_output_tokens": check_cap("max_output_tokens", max_output_tokens),
            "expires_at": check_expiry(expires_at, self._clock.now()),
        }
        async with self._changing(actor, tenant) as change:
            owner = await find_project(change.connection, change.tenant, project, in_use=True)
            record = await _insert(
                change.connection, new, {**values, "tenant_id": change.tenant.id, "project_id": owner.id}
            )
            await change.audit("create", "key", record.public_id, after=_audited(record))
        return new.text, record

    async def key(self, public_id: str, tenant: str | UUID | None = None) -> KeyRecord:
        """A tenant's or an administrator's key; with ``tenant`` only one of that tenant. Raises UnknownTenant,
        UnknownKey."""
        async with transaction(self._engine) as connection:
            record = await _find(connection, public_id)
            if tenant is not None:
                _check_owner(record, (await find_tenant(connection, tenant)).id)
            return record

    async def list_keys(
        self,
        tenant: str | UUID | None = None,
        project: str | UUID | None = None,
        *,
        after: str | None = None,
        limit: int = 100,
    ) -> list[KeyRecord]:
        """Keys of a tenant or one of its projects, else of all tenants; oldest first, those after the key ``after``.

        Raises UnknownTenant, UnknownProject, ConfigurationError.
        """
        query = _page(after, limit).where(api_keys.c.tenant_id.is_not(None))
        if project is not None and tenant is None:
            raise ConfigurationError("a project is named together with its tenant")
        async with transaction(self._engine) as connection:
            if tenant is not None:
                owner = await find_tenant(connection, tenant)
                query = query.where(api_keys.c.tenant_id == owner.id)
                if project is not None:
                    found = await find_project(connection, owner, project)
                    query = query.where(api_keys.c.project_id == found.id)
            return [_record(row) for row in (await connection.execute(query)).mappings()]

    async def update_key(
        self,
        actor: Actor,
        public_id: str,
        change: KeyChange,
        *,
        if_version: int | None = None,
        tenant: str | UUID | None = None,
    ) -> KeyRecord:
        """The last owner's key can be given an end only at the console.

        Raises UnknownTenant, UnknownKey, VersionConflict, LastOwner, NotAllowed, ConfigurationError.
        """
        async with self._changing_key(actor, public_id, tenant) as (connection, before, owner):
            check_version("key", public_id, if_version, before.version)
            given = {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}
            values = {name: value for name, value in given.items() if value != getattr(before, name)}
            if not values:
                return before
            if before.tenant_id is None and not values.keys() <= {"name", "expires_at"}:
                raise ConfigurationError("of an administrator's key only name and expiry can be changed")
            if before.role == "owner" and _ends_sooner(before, values.get("expires_at")) and not actor.is_console:
                await self._check_not_last_owner(connection, public_id)
            after = await _update(connection, public_id, self._checked(values))
            await self._audit(connection, actor, owner, "update", before, after)
            return after

    async def rotate_key(
        self,
        actor: Actor,
        public_id: str,
        *,
        grace_s: float = 0,
        if_version: int | None = None,
        tenant: str | UUID | None = None,
    ) -> tuple[str, KeyRecord]:
        """A new secret for a key, which keeps its public id and all else; the one before is good for ``grace_s``
        seconds more, none before that at all. The text is not shown again.

        Raises UnknownTenant, UnknownKey, VersionConflict, NotAllowed, ConfigurationError.
        """
        check_grace(grace_s)
        async with self._changing_key(actor, public_id, tenant) as (connection, before, owner):
            check_version("key", public_id, if_version, before.version)
            new = renew_key(public_id)
            values: dict[str, Any] = {"previous_secret_sha256": None, "previous_until": None}
            if grace_s:
                values["previous_secret_sha256"] = api_keys.c.secret_sha256
                values["previous_until"] = self._clock.now() + timedelta(seconds=grace_s)
            after = await _update(connection, public_id, {**values, "secret_sha256": new.secret_sha256})
            await self._audit(connection, actor, owner, "rotate", before, after)
        return new.text, after

    async def revoke_key(
        self, actor: Actor, public_id: str, *, if_version: int | None = None, tenant: str | UUID | None = None
    ) -> KeyRecord:
        """End a key, a tenant's or an administrator's. Revoking it again changes nothing.

        The last owner's key can only be revoked at the console. Raises UnknownTenant, UnknownKey, VersionConflict,
        LastOwner, NotAllowed.
        """
        async with self._changing_key(actor, public_id, tenant, revoked=True) as (connection, before, owner):
            check_version("key", public_id, if_version, before.version)
            if before.revoked_at is not None:
                return before
            if before.role == "owner" and not actor.is_console:
                await self._check_not_last_owner(connection, public_id)
            after = await _update(connection, public_id, {"revoked_at": func.now()})
            await self._audit(connection, actor, owner, "revoke", before, after)
            return after

    async def create_admin_key(
        self, actor: Actor, name: str = "admin", *, role: AdminRole = "owner", expires_at: datetime | None = None
    ) -> tuple[str, KeyRecord]:
        """A key for ``/admin``, of no tenant. Raises NotAllowed, ConfigurationError."""
        actor.check_may_manage_admins()
        if role not in ROLES:
            raise ConfigurationError(f"a role is one of {', '.join(ROLES)}, not {role!r}")
        new = generate_key()
        values = {
            "name": check_name("key", name),
            "role": role,
            "scopes": ["admin"],
            "expires_at": check_expiry(expires_at, self._clock.now()),
        }
        async with transaction(self._engine) as connection:
            await self._check_in_force(connection, actor)
            record = await _insert(connection, new, values)
            await audit(connection, actor, "create", "admin_key", record.public_id, after=_audited(record))
        return new.text, record

    async def list_admin_keys(self, *, after: str | None = None, limit: int = 100) -> list[KeyRecord]:
        """Oldest first. Raises ConfigurationError."""
        query = _page(after, limit).where(api_keys.c.tenant_id.is_(None))
        async with transaction(self._engine) as connection:
            return [_record(row) for row in (await connection.execute(query)).mappings()]

    @asynccontextmanager
    async def _changing_key(
        self, actor: Actor, public_id: str, tenant: str | UUID | None, *, revoked: bool = False
    ) -> AsyncIterator[tuple[AsyncConnection, KeyRecord, Change | None]]:
        """The key as it is, under the lock of its tenant or, of an administrator's, of all administrators' keys; the
        change of its tenant, None for an administrator's. ``revoked``: it may be."""
        actor.check_may_change()
        found = await self.key(public_id, tenant)
        if found.tenant_id is None:
            actor.check_may_manage_admins()
            async with transaction(self._engine) as connection:
                # In one order, so that two owners who revoke each other do not both find the other's key good.
                await connection.execute(
                    select(api_keys.c.public_id)
                    .where(api_keys.c.tenant_id.is_(None))
                    .order_by(api_keys.c.public_id)
                    .with_for_update()
                )
                await self._check_in_force(connection, actor)
                before = await _find(connection, public_id)
                _check_in_use(before, revoked)
                yield connection, before, None
            if self._forget is not None:
                self._forget(None)
            return
        async with self._changing(actor, found.tenant_id) as change:
            before = await _find(change.connection, public_id)
            _check_in_use(before, revoked)
            yield change.connection, before, change

    async def _audit(
        self,
        connection: AsyncConnection,
        actor: Actor,
        owner: Change | None,
        action: str,
        before: KeyRecord,
        after: KeyRecord,
    ) -> None:
        old, new = _audited(before), _audited(after)
        if owner is not None:
            await owner.audit(action, "key", after.public_id, before=old, after=new)
        else:
            await audit(connection, actor, action, "admin_key", after.public_id, before=old, after=new)

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        checked = dict(values)
        if "name" in values:
            check_name("key", values["name"])
        if "scopes" in values:
            checked["scopes"] = sorted(check_scopes(values["scopes"]))
        if values.get("allowed_models") is not None:
            checked["allowed_models"] = check_names("route", values["allowed_models"])
        for name in ("max_context_tokens", "max_output_tokens"):
            if name in values:
                check_cap(name, values[name])
        if "expires_at" in values:
            check_expiry(values["expires_at"], self._clock.now())
        return checked

    async def _check_in_force(self, connection: AsyncConnection, actor: Actor) -> None:
        """Raises NotAllowed if the actor's key was ended: another gateway takes it from its cache for some seconds, in
        which it must not make itself a successor."""
        if actor.is_console:
            return
        own = select(api_keys.c.public_id).where(
            api_keys.c.public_id == actor.name,
            api_keys.c.role == "owner",
            api_keys.c.revoked_at.is_(None),
            api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > self._clock.now()),
        )
        # Waits for a revocation that is under way.
        if await connection.scalar(own.with_for_update(read=True)) is None:
            raise NotAllowed("the key that asks is no owner's key any more; use another owner's")

    async def _check_not_last_owner(self, connection: AsyncConnection, public_id: str) -> None:
        others = select(func.count()).where(
            api_keys.c.role == "owner",
            api_keys.c.revoked_at.is_(None),
            api_keys.c.public_id != public_id,
            api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > self._clock.now()),
        )
        if not await connection.scalar(others):
            raise LastOwner


def _query() -> Select[Any]:
    return select(*_COLUMNS).select_from(
        api_keys.outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id).outerjoin(
            projects, projects.c.id == api_keys.c.project_id
        )
    )


def _page(after: str | None, limit: int) -> Select[Any]:
    query = _query().order_by(api_keys.c.created_at, api_keys.c.public_id).limit(check_page(limit, after))
    if after is None:
        return query
    begin = api_keys.alias()
    last = select(begin.c.created_at, begin.c.public_id).where(begin.c.public_id == after)
    return query.where(tuple_(api_keys.c.created_at, api_keys.c.public_id) > last.scalar_subquery())


async def _find(connection: AsyncConnection, public_id: str) -> KeyRecord:
    row = None
    if is_name(public_id):
        row = (await connection.execute(_query().where(api_keys.c.public_id == public_id))).mappings().one_or_none()
    if row is None:
        raise UnknownKey(public_id)
    return _record(row)


async def _insert(connection: AsyncConnection, new: NewKey, values: dict[str, Any]) -> KeyRecord:
    stored = {**values, "public_id": new.public_id, "secret_sha256": new.secret_sha256}
    await connection.execute(insert(api_keys).values(stored))
    return await _find(connection, new.public_id)


async def _update(connection: AsyncConnection, public_id: str, values: dict[str, Any]) -> KeyRecord:
    query = update(api_keys).where(api_keys.c.public_id == public_id)
    await connection.execute(query.values(**values, version=api_keys.c.version + 1))
    return await _find(connection, public_id)


def _check_owner(record: KeyRecord, tenant_id: UUID) -> None:
    if record.tenant_id != tenant_id:
        raise UnknownKey(record.public_id)


def _check_in_use(record: KeyRecord, revoked: bool) -> None:
    if record.revoked_at is not None and not revoked:
        raise StateConflict(f"key {record.public_id!r} is revoked; issue another")


def _ends_sooner(before: KeyRecord, expires_at: datetime | None) -> bool:
    return expires_at is not None and (before.expires_at is None or expires_at < before.expires_at)


def _record(row: Any) -> KeyRecord:
    models = row["allowed_models"]
    sets = {"scopes": frozenset(row["scopes"]), "allowed_models": None if models is None else frozenset(models)}
    return KeyRecord(**(dict(row) | sets))


def _audited(record: KeyRecord) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(record, order="sorted")
    return values
