"""``/tenants/{tenant}/projects``: what keys belong to, so that usage can be told and limited apart."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter
from msgspec import UNSET, UnsetType

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
from gateway.policies.answer_cache import CachePolicy
from gateway.tenants.directory import Directory
from gateway.tenants.records import ProjectRecord

ProjectRef = Annotated[
    str, PathParameter(description="Name or id of the project.", examples=[Example(summary="A name", value="default")])
]


class Project(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    tenant_id: UUID
    name: str
    created_at: datetime
    archived_at: datetime | None
    """Since then its keys are invalid."""
    version: int
    """As in the ``ETag``."""
    answer_cache: CachePolicy
    """Only what differs from what the tenant says."""


class NewProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name


class ProjectPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays. A policy takes the place of all that it was."""

    name: Name | UnsetType = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET


def project_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    @get(
        "/tenants/{tenant:str}/projects",
        operation_id="listProjects",
        operation_class=documented(404),
        summary="List a tenant's projects, by name",
    )
    async def list_(
        tenant: TenantRef, limit: PageSize = 100, after: After = None, archived: Archived = False
    ) -> Page[Project]:
        found = await directory.list_projects(tenant, after=name_cursor(after), limit=limit + 1, archived=archived)
        shown, following = page_of(found, limit, lambda record: record.name)
        return Page([_shown(record) for record in shown], following)

    @post(
        "/tenants/{tenant:str}/projects",
        role="admin",
        dto=Body[NewProject],
        return_dto=None,
        operation_id="createProject",
        operation_class=documented(403, 404, 409, example={"name": "website"}, tagged=True, created=True),
        summary="Create a project",
    )
    async def create(request: AnyRequest, tenant: TenantRef, data: JSONBody[NewProject]) -> Response[Project]:
        record = await directory.create_project(actor_of(request), tenant, data.name)
        path = f"/tenants/{record.tenant_id}/projects/{record.id}"
        return single(_shown(record), record.version, created_at=path)

    @get(
        "/tenants/{tenant:str}/projects/{project:str}",
        operation_id="retrieveProject",
        operation_class=documented(404, tagged=True),
        summary="Show a project",
    )
    async def retrieve(tenant: TenantRef, project: ProjectRef) -> Response[Project]:
        record = await directory.project(tenant, project)
        return single(_shown(record), record.version)

    @patch(
        "/tenants/{tenant:str}/projects/{project:str}",
        role="admin",
        dto=Body[ProjectPatch],
        return_dto=None,
        operation_id="updateProject",
        operation_class=documented(403, 404, 409, 412, example={"name": "default"}, tagged=True),
        summary="Change a project",
    )
    async def update(
        request: AnyRequest,
        tenant: TenantRef,
        project: ProjectRef,
        data: JSONBody[ProjectPatch],
        if_match: IfMatch = None,
    ) -> Response[Project]:
        record = await directory.update_project(
            actor_of(request), tenant, project, **given(data), if_version=expected_version(if_match)
        )
        return single(_shown(record), record.version)

    @delete(
        "/tenants/{tenant:str}/projects/{project:str}",
        role="admin",
        status_code=200,
        operation_id="archiveProject",
        operation_class=documented(403, 404, 409, 412, tagged=True),
        summary="Archive a project: its keys are invalid from now on",
    )
    async def archive(
        request: AnyRequest, tenant: TenantRef, project: ProjectRef, if_match: IfMatch = None
    ) -> Response[Project]:
        record = await directory.archive_project(
            actor_of(request), tenant, project, if_version=expected_version(if_match)
        )
        return single(_shown(record), record.version)

    return [list_, create, retrieve, update, archive]


def _shown(record: ProjectRecord) -> Project:
    return Project(**asdict(record))
