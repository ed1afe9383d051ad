"""Projects of a tenant: what keys belong to, so that usage can be told and limited apart."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.engine import transaction
from gateway.db.tables import projects
from gateway.ids import uuid7
from gateway.policies.answer_cache import CachePolicy
from gateway.policies.stored import read_policy
from gateway.tenants.audit import Actor
from gateway.tenants.changes import Change, Changes, check_version, columns, find_tenant, named
from gateway.tenants.records import (
    ProjectExists,
    ProjectRecord,
    StateConflict,
    TenantRecord,
    UnknownProject,
    check_name,
)
from gateway.tenants.specs import check_narrower, check_page


class ProjectChanges(Changes):
    async def create_project(self, actor: Actor, tenant: str | UUID, name: str) -> ProjectRecord:
        """Raises UnknownTenant, ProjectExists, NotAllowed, ConfigurationError."""
        check_name("project", name)
        try:
            async with self._changing(actor, tenant) as change:
                query = insert(projects).values(id=uuid7(), tenant_id=change.tenant.id, name=name).returning(projects)
                record = _record((await change.connection.execute(query)).one())
                await change.audit("create", "project", name, after=msgspec.to_builtins(record))
        except IntegrityError as fault:
            raise ProjectExists(name, str(tenant)) from fault
        return record

    async def project(self, tenant: str | UUID, ref: str | UUID) -> ProjectRecord:
        """By name or id, archived or not. Raises UnknownTenant, UnknownProject."""
        async with transaction(self._engine) as connection:
            return await find_project(connection, await find_tenant(connection, tenant), ref)

    async def list_projects(
        self, tenant: str | UUID, *, after: str | None = None, limit: int = 100, archived: bool = False
    ) -> list[ProjectRecord]:
        """By name, those after ``after``; with ``archived`` those too that are. Raises UnknownTenant,
        ConfigurationError."""
        query = select(projects).order_by(projects.c.name).limit(check_page(limit, after))
        if after is not None:
            query = query.where(projects.c.name > after)
        if not archived:
            query = query.where(projects.c.archived_at.is_(None))
        async with transaction(self._engine) as connection:
            owner = await find_tenant(connection, tenant)
            rows = await connection.execute(query.where(projects.c.tenant_id == owner.id))
            return [_record(row) for row in rows]

    async def update_project(
        self,
        actor: Actor,
        tenant: str | UUID,
        ref: str | UUID,
        *,
        name: str | None = None,
        answer_cache: CachePolicy | None = None,
        if_version: int | None = None,
    ) -> ProjectRecord:
        """Rename a project, or say what it wants of the answer cache; None: as it is.

        Raises UnknownTenant, UnknownProject, ProjectExists, VersionConflict, NotAllowed, ConfigurationError.
        """
        given = {"name": name, "answer_cache": answer_cache}
        if name is not None:
            check_name("project", name)
        if answer_cache is not None:
            check_narrower(answer_cache)
        try:
            async with self._changing(actor, tenant) as change:
                before = await _changeable(change, ref, if_version)
                values = {
                    field: value
                    for field, value in given.items()
                    if value is not None and value != getattr(before, field)
                }
                return await _update(change, "update", before, values) if values else before
        except IntegrityError as fault:
            raise ProjectExists(str(name), str(tenant)) from fault

    async def archive_project(
        self, actor: Actor, tenant: str | UUID, ref: str | UUID, *, if_version: int | None = None
    ) -> ProjectRecord:
        """End a project: its keys are invalid from now on. Raises UnknownTenant, UnknownProject, VersionConflict,
        NotAllowed, StateConflict if it is archived already."""
        async with self._changing(actor, tenant) as change:
            before = await _changeable(change, ref, if_version)
            return await _update(change, "archive", before, {"archived_at": func.now()})


async def find_project(
    connection: AsyncConnection, tenant: TenantRecord, ref: str | UUID, *, in_use: bool = False
) -> ProjectRecord:
    """By name or id. Raises UnknownProject; with ``in_use`` StateConflict, if it is archived."""
    query = select(projects).where(projects.c.tenant_id == tenant.id, named(projects, ref))
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise UnknownProject(ref, tenant.name)
    if in_use and row.archived_at is not None:
        raise StateConflict(f"project {row.name!r} of tenant {tenant.name!r} is archived; choose another")
    return _record(row)


async def _changeable(change: Change, ref: str | UUID, if_version: int | None) -> ProjectRecord:
    before = await find_project(change.connection, change.tenant, ref, in_use=True)
    check_version("project", before.name, if_version, before.version)
    return before


async def _update(change: Change, action: str, before: ProjectRecord, values: dict[str, Any]) -> ProjectRecord:
    query = update(projects).where(projects.c.id == before.id).values(**columns(values), version=projects.c.version + 1)
    after = _record((await change.connection.execute(query.returning(projects))).one())
    await change.audit(
        action, "project", before.name, before=msgspec.to_builtins(before), after=msgspec.to_builtins(after)
    )
    return after


def _record(row: Row[Any]) -> ProjectRecord:
    values = dict(row._mapping)
    values["answer_cache"] = read_policy(values["answer_cache"], CachePolicy)
    return ProjectRecord(**values)
