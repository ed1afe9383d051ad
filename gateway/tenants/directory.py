"""The directory of who may call: tenants, their projects, keys and limits, administrators' keys, the audit log."""

from __future__ import annotations

from uuid import UUID

from gateway.db.engine import transaction
from gateway.tenants.audit import Actor, AuditRecord, read_audit
from gateway.tenants.changes import find_tenant
from gateway.tenants.key_changes import KeyChanges
from gateway.tenants.limit_changes import LimitChanges
from gateway.tenants.project_changes import ProjectChanges
from gateway.tenants.specs import (
    KeyChange,
    LimitChange,
    LimitSpec,
    TenantChange,
    TenantSettings,
    check_filter,
    check_page,
)
from gateway.tenants.tenant_changes import TenantChanges

__all__ = ["Actor", "Directory", "KeyChange", "LimitChange", "LimitSpec", "TenantChange", "TenantSettings"]


class Directory(TenantChanges, ProjectChanges, KeyChanges, LimitChanges):
    """Reads and changes the configuration in Postgres.

    Every change checks the actor's role, is written to the audit log in its own transaction, raises the tenant's
    generation and announces it. Admission compares generations on each request, so a change that was announced is in
    force at once; one whose announcement was lost, within the time for which ``Tenants`` trusts its cache.

    Every method raises DatabaseUnavailable when Postgres is away.
    """

    async def list_audit(
        self,
        *,
        tenant: str | UUID | None = None,
        kind: str | None = None,
        actor: str | None = None,
        after: UUID | None = None,
        limit: int = 100,
    ) -> list[AuditRecord]:
        """The newest first; ``after``: those older than that entry. Raises UnknownTenant, ConfigurationError."""
        check_page(limit)
        check_filter(kind)
        check_filter(actor)
        async with transaction(self._engine) as connection:
            owner = None if tenant is None else (await find_tenant(connection, tenant)).id
            return await read_audit(connection, tenant_id=owner, kind=kind, actor=actor, after=after, limit=limit)
