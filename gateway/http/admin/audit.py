"""``/audit``: who changed what, the newest first. It only grows."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter

from gateway.http.admin.resource import After, Page, PageSize, bad_cursor, documented, page_of
from gateway.http.errors import Problem
from gateway.tenants.directory import Directory
from gateway.tenants.records import as_id

OfTenant = Annotated[str | None, QueryParameter(description="Only changes of this tenant; name or id.")]
OfKind = Annotated[
    str | None,
    QueryParameter(
        max_length=100,
        description="Only changes of this kind of thing: tenant, project, key, admin_key, limit, pool, backend, route, "
        "price, dead_event, prompt, answer_cache.",
    ),
]
ByActor = Annotated[
    str | None,
    QueryParameter(
        max_length=200, description="Only changes by this one: an admin key's public id, or `cli:` and a user's name."
    ),
]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    at: datetime
    actor: str
    """An admin key's public id, or ``cli:`` and the user at the console."""
    action: str
    kind: str
    target: str
    """Name or id of what was changed."""
    tenant_id: UUID | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def audit_handlers(directory: Directory) -> list[HTTPRouteHandler]:
    @get(
        "/audit",
        operation_id="listAudit",
        operation_class=documented(404),
        summary="List changes, the newest first",
    )
    async def list_(
        tenant: OfTenant = None,
        kind: OfKind = None,
        actor: ByActor = None,
        limit: PageSize = 100,
        after: After = None,
    ) -> Page[AuditEntry]:
        for name, value in (("kind", kind), ("actor", actor)):
            if value is not None and not value.isprintable():
                raise Problem(400, f"{name}: it has characters that no entry has.", field=name)
        begin = None if after is None else as_id(after)
        if after is not None and begin is None:
            raise bad_cursor()
        found = await directory.list_audit(tenant=tenant, kind=kind, actor=actor, after=begin, limit=limit + 1)
        shown, following = page_of(found, limit, lambda record: str(record.id))
        return Page([AuditEntry(**asdict(record)) for record in shown], following)

    return [list_]
