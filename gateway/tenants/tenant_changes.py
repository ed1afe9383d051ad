"""Tenants: created, changed, archived."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
from msgspec import UNSET
from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.db.engine import transaction
from gateway.db.tables import limits as limits_table
from gateway.db.tables import projects, tenants
from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.changes import TENANT_COLUMNS, Change, Changes, check_version, columns, find_tenant, tenant_record
from gateway.tenants.limit_changes import limit_record, put_limit, remove_limit
from gateway.tenants.records import ConfigurationError, TenantExists, TenantRecord, UnknownLimit, check_name
from gateway.tenants.specs import LimitSpec, TenantChange, TenantSettings, check_page, check_settings

DEFAULT_PROJECT = "default"


class TenantChanges(Changes):
    async def create_tenant(
        self,
        actor: Actor,
        name: str,
        *,
        settings: TenantSettings = TenantSettings(),  # noqa: B008 - it is immutable
        limits: Sequence[LimitSpec] = (),
    ) -> TenantRecord:
        """A tenant with a project ``default``. With a webhook its record bears the signing secret, this once.

        Raises TenantExists, NotAllowed, ConfigurationError.
        """
        actor.check_may_change()
        tenant_id = uuid7()
        webhook_secret, sealed = self._new_webhook_secret(tenant_id, check_settings(settings).webhook_url)
        values = {
            "id": tenant_id,
            "name": check_name("tenant", name),
            "salt": secrets.token_hex(16),
            "webhook_secret": sealed,
            **columns(msgspec.structs.asdict(settings)),
        }
        try:
            async with transaction(self._engine) as connection:
                row = (await connection.execute(insert(tenants).values(values).returning(*TENANT_COLUMNS))).one()
                change = Change(connection, actor, tenant_record(row))
                await change.audit("create", "tenant", name, after=_audited(change.tenant))
                project = {"id": uuid7(), "tenant_id": tenant_id, "name": DEFAULT_PROJECT}
                await connection.execute(insert(projects).values(project))
                await change.audit("create", "project", DEFAULT_PROJECT, after=project)
                for spec in limits:
                    await put_limit(change, spec, self._secret_key)
        except IntegrityError as fault:
            raise TenantExists(name) from fault
        await self._tell(tenant_id, change.tenant.generation)
        return replace(change.tenant, webhook_secret=webhook_secret)

    async def tenant(self, ref: str | UUID) -> TenantRecord:
        """By name or id, archived or not. Raises UnknownTenant."""
        async with transaction(self._engine) as connection:
            return await find_tenant(connection, ref)

    async def list_tenants(
        self, *, after: str | None = None, limit: int = 100, archived: bool = False
    ) -> list[TenantRecord]:
        """By name, those after ``after``; with ``archived`` those too that are. Raises ConfigurationError."""
        query = select(*TENANT_COLUMNS).order_by(tenants.c.name).limit(check_page(limit, after))
        if after is not None:
            query = query.where(tenants.c.name > after)
        if not archived:
            query = query.where(tenants.c.archived_at.is_(None))
        async with transaction(self._engine) as connection:
            return [tenant_record(row) for row in await connection.execute(query)]

    async def update_tenant(
        self,
        actor: Actor,
        ref: str | UUID,
        change: TenantChange,
        *,
        if_version: int | None = None,
        limits: Sequence[LimitSpec] = (),
        lifted: Collection[UUID] = (),
    ) -> TenantRecord:
        """Change a tenant, set ``limits`` and lift those whose ids are ``lifted``: all of it or nothing.

        With another webhook its record bears the new signing secret, this once. Raises UnknownTenant, TenantExists,
        UnknownLimit, VersionConflict, NotAllowed, ConfigurationError.
        """
        try:
            async with self._changing(actor, ref) as changing:
                before = changing.tenant
                check_version("tenant", before.name, if_version, before.version)
                after, secret = await self._write(changing, change)
                for limit_id in lifted:
                    query = select(limits_table).where(
                        limits_table.c.id == limit_id, limits_table.c.tenant_id == before.id
                    )
                    row = (await changing.connection.execute(query)).one_or_none()
                    if row is None:
                        raise UnknownLimit(limit_id, before.name)
                    await remove_limit(changing, limit_record(row))
                for spec in limits:
                    await put_limit(changing, spec, self._secret_key)
        except IntegrityError as fault:
            raise TenantExists(str(change.name)) from fault
        return replace(after, generation=changing.generation, webhook_secret=secret)

    async def archive_tenant(self, actor: Actor, ref: str | UUID, *, if_version: int | None = None) -> TenantRecord:
        """End a tenant: its keys are invalid from now on. Its usage stays in the ledger, its name stays taken.

        Raises UnknownTenant, VersionConflict, NotAllowed, ConfigurationError if it is archived already.
        """
        async with self._changing(actor, ref) as changing:
            before = changing.tenant
            check_version("tenant", before.name, if_version, before.version)
            after = await _update(changing, {"archived_at": func.now()})
            await changing.audit("archive", "tenant", before.name, before=_audited(before), after=_audited(after))
        return replace(after, generation=changing.generation)

    async def _write(self, changing: Change, change: TenantChange) -> tuple[TenantRecord, str | None]:
        before = changing.tenant
        given = {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}
        values = {name: value for name, value in given.items() if value != getattr(before, name)}
        if not values:
            return before, None
        if "name" in values:
            check_name("tenant", values["name"])
        merged = {name: getattr(before, name) for name in TenantSettings.__struct_fields__} | values
        check_settings(TenantSettings(**{name: merged[name] for name in TenantSettings.__struct_fields__}))
        secret: str | None = None
        if "webhook_url" in values:
            secret, values["webhook_secret"] = self._new_webhook_secret(before.id, values["webhook_url"])
        after = await _update(changing, values)
        await changing.audit("update", "tenant", before.name, before=_audited(before), after=_audited(after))
        return after, secret

    def _new_webhook_secret(self, tenant_id: UUID, url: str | None) -> tuple[str | None, bytes | None]:
        if url is None:
            return None, None
        if self._secret_key is None:
            raise ConfigurationError("to set a webhook set PENSTOCK_SECRET_KEY, as the gateways have it")
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()  # as Standard Webhooks has it
        return secret, seal_webhook_secret(self._secret_key, tenant_id, secret)


def seal_webhook_secret(secret_key: SecretKey, tenant_id: UUID, secret: str) -> bytes:
    return secret_key.seal("webhook", secret.encode(), context=tenant_id.bytes)


def unseal_webhook_secret(secret_key: SecretKey, tenant_id: UUID, sealed: bytes) -> str:
    """What signs the messages to a tenant's webhook, from ``tenants.webhook_secret``. Raises SealBroken."""
    return secret_key.unseal("webhook", sealed, context=tenant_id.bytes).decode()


async def _update(changing: Change, values: dict[str, Any]) -> TenantRecord:
    query = (
        update(tenants)
        .where(tenants.c.id == changing.tenant.id)
        .values(**columns(values), version=tenants.c.version + 1)
        .returning(*TENANT_COLUMNS)
    )
    return tenant_record((await changing.connection.execute(query)).one())


def _audited(record: TenantRecord) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(record)
    # Every change of a key raises the generation, too: no part of what was changed.
    for name in ("webhook_secret", "generation"):
        del values[name]
    if record.webhook_url is not None:
        # Whoever knows the path of such a URL may often write to it. That it is another one must be told all the same.
        parts, digest = urlsplit(record.webhook_url), hashlib.sha256(record.webhook_url.encode()).hexdigest()
        values["webhook_url"] = f"{parts.scheme}://{parts.netloc}/... (sha256 {digest[:8]})"
    return values
