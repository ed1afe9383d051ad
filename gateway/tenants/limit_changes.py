"""Limits: set, changed and lifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.engine import transaction
from gateway.db.tables import api_keys, limits, projects, routes
from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.changes import Change, Changes, check_version, find_tenant, named
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.records import (
    ConfigurationError,
    LimitExists,
    LimitRecord,
    StateConflict,
    TenantRecord,
    UnknownKey,
    UnknownLimit,
    UnknownProject,
    as_id,
)
from gateway.tenants.specs import LimitChange, LimitSpec, check_limit

MAX_LIMITS = 1000
"""Of one tenant: all of them travel with each of its keys."""


class LimitChanges(Changes):
    async def set_limit(
        self, actor: Actor, tenant: str | UUID, spec: LimitSpec, *, if_version: int | None = None
    ) -> LimitRecord:
        """Set a limit, in place of the one of the same subject, target, metric and window, if there is one.

        Raises UnknownTenant, UnknownProject, UnknownKey, VersionConflict, NotAllowed, ConfigurationError.
        """
        async with self._changing(actor, tenant) as change:
            return await put_limit(change, spec, self._secret_key, if_version=if_version)

    async def set_limits(self, actor: Actor, tenant: str | UUID, specs: Sequence[LimitSpec]) -> list[LimitRecord]:
        """As ``set_limit``, all of them or none."""
        async with self._changing(actor, tenant) as change:
            return [await put_limit(change, spec, self._secret_key) for spec in specs]

    async def create_limit(self, actor: Actor, tenant: str | UUID, spec: LimitSpec) -> LimitRecord:
        """As ``set_limit``, but in place of none. Raises LimitExists, and as ``set_limit``."""
        async with self._changing(actor, tenant) as change:
            return await put_limit(change, spec, self._secret_key, new=True)

    async def update_limit(
        self,
        actor: Actor,
        tenant: str | UUID,
        limit_id: str | UUID,
        update_: LimitChange,
        *,
        if_version: int | None = None,
    ) -> LimitRecord:
        """Raises UnknownTenant, UnknownLimit, VersionConflict, NotAllowed, ConfigurationError."""
        async with self._changing(actor, tenant) as change:
            before = await _limit(change.connection, change.tenant, limit_id)
            check_version("limit", str(before.id), if_version, before.version)
            spec = LimitSpec(
                subject=before.subject,
                # Good already, and of an end user it is the hash.
                target="" if before.subject == "end_user" else before.target,
                metric=before.metric,
                window=before.window,
                amount=before.amount if update_.amount is UNSET else update_.amount,
                hard=before.hard if update_.hard is UNSET else update_.hard,
                thresholds=before.thresholds if update_.thresholds is UNSET else update_.thresholds,
            )
            return await _replace(change, before, check_limit(spec))

    async def list_limits(self, tenant: str | UUID) -> list[LimitRecord]:
        """All of a tenant's, by subject, target, metric and window. Raises UnknownTenant."""
        async with transaction(self._engine) as connection:
            owner = await find_tenant(connection, tenant)
            query = select(limits).where(limits.c.tenant_id == owner.id)
            ordered = query.order_by(limits.c.subject, limits.c.target, limits.c.metric, limits.c.window)
            return [limit_record(row) for row in await connection.execute(ordered)]

    async def limit(self, tenant: str | UUID, limit_id: str | UUID) -> LimitRecord:
        """Raises UnknownTenant, UnknownLimit."""
        async with transaction(self._engine) as connection:
            return await _limit(connection, await find_tenant(connection, tenant), limit_id)

    async def delete_limit(
        self, actor: Actor, tenant: str | UUID, limit_id: str | UUID, *, if_version: int | None = None
    ) -> LimitRecord:
        """Lift a limit. Raises UnknownTenant, UnknownLimit, VersionConflict, NotAllowed."""
        async with self._changing(actor, tenant) as change:
            record = await _limit(change.connection, change.tenant, limit_id)
            check_version("limit", str(record.id), if_version, record.version)
            await remove_limit(change, record)
            return record


async def put_limit(
    change: Change,
    spec: LimitSpec,
    secret_key: SecretKey | None,
    *,
    if_version: int | None = None,
    new: bool = False,
) -> LimitRecord:
    """As ``LimitChanges.set_limit``, within a change; ``new``: as ``create_limit``."""
    target = await _target(change, check_limit(spec), secret_key)
    mine = limits.c.tenant_id == change.tenant.id
    row = (
        await change.connection.execute(
            select(limits).where(
                mine,
                limits.c.subject == spec.subject,
                limits.c.target == target,
                limits.c.metric == spec.metric,
                limits.c.window == (spec.window or ""),
            )
        )
    ).one_or_none()
    name = " ".join(filter(None, (spec.subject, target, spec.metric, spec.window)))
    check_version("limit", name, if_version, None if row is None else row.version)
    if row is not None and new:
        raise LimitExists(row.id)
    if row is not None:
        return await _replace(change, limit_record(row), spec)
    count = await change.connection.scalar(select(func.count()).select_from(limits).where(mine))
    if (count or 0) >= MAX_LIMITS:
        raise StateConflict(
            f"tenant {change.tenant.name!r} has {MAX_LIMITS} limits already, the most there can be; lift some, or "
            "limit each end user alike instead of one by one"
        )
    query = insert(limits).values(
        id=uuid7(),
        tenant_id=change.tenant.id,
        subject=spec.subject,
        target=target,
        metric=spec.metric,
        window=spec.window or "",
        **_values(spec),
    )
    record = limit_record((await change.connection.execute(query.returning(limits))).one())
    await change.audit("create", "limit", str(record.id), after=_audited(record))
    return record


async def remove_limit(change: Change, record: LimitRecord) -> None:
    await change.connection.execute(delete(limits).where(limits.c.id == record.id))
    await change.audit("delete", "limit", str(record.id), before=_audited(record))


def limit_record(row: Row[Any]) -> LimitRecord:
    values = dict(row._mapping)
    return LimitRecord(**(values | {"window": row.window or None, "thresholds": tuple(row.thresholds)}))


async def _replace(change: Change, before: LimitRecord, spec: LimitSpec) -> LimitRecord:
    values = _values(spec)
    if values == {"amount": before.amount, "hard": before.hard, "thresholds": list(before.thresholds)}:
        return before
    query = update(limits).where(limits.c.id == before.id).values(**values, version=limits.c.version + 1)
    record = limit_record((await change.connection.execute(query.returning(limits))).one())
    await change.audit("update", "limit", str(record.id), before=_audited(before), after=_audited(record))
    return record


def _values(spec: LimitSpec) -> dict[str, Any]:
    return {"amount": spec.amount, "hard": spec.hard, "thresholds": sorted(set(spec.thresholds))}


def _audited(record: LimitRecord) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(record)
    return values


async def _limit(connection: AsyncConnection, tenant: TenantRecord, limit_id: str | UUID) -> LimitRecord:
    id_ = as_id(limit_id)
    query = select(limits).where(limits.c.id == id_, limits.c.tenant_id == tenant.id)
    row = None if id_ is None else (await connection.execute(query)).one_or_none()
    if row is None:
        raise UnknownLimit(limit_id, tenant.name)
    return limit_record(row)


async def _target(change: Change, spec: LimitSpec, secret_key: SecretKey | None) -> str:
    """The target as it is stored. Raises UnknownProject, UnknownKey, ConfigurationError for what is not there."""
    connection, tenant = change.connection, change.tenant
    if spec.subject == "end_user" and spec.target:
        if secret_key is None:
            raise ConfigurationError("to limit one end user set PENSTOCK_SECRET_KEY, as the gateways have it")
        return end_user_hash(secret_key, tenant.id, spec.target)
    if spec.subject == "project":
        mine = named(projects, spec.target) & (projects.c.tenant_id == tenant.id)
        project_id = await connection.scalar(select(projects.c.id).where(mine))
        if project_id is None:
            raise UnknownProject(spec.target, tenant.name)
        return str(project_id)
    if spec.subject == "key":
        mine = (api_keys.c.public_id == spec.target) & (api_keys.c.tenant_id == tenant.id)
        if await connection.scalar(select(api_keys.c.public_id).where(mine)) is None:
            raise UnknownKey(spec.target)
    if spec.subject == "model":
        known = await connection.scalar(select(routes.c.name).where(routes.c.name == spec.target))
        if known is None:
            raise ConfigurationError(f"there is no route {spec.target!r}; `penstock route list` shows those there are")
    return spec.target
