"""Who changed what: entries of the append-only audit log, written in the transaction of the change itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.tables import audit_log
from gateway.ids import uuid7
from gateway.tenants.principal import AdminRole


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change: an admin key's public id, or ``cli:`` and the operating system's user."""

    name: str
    role: AdminRole = "owner"


async def audit(
    connection: AsyncConnection,
    actor: Actor,
    action: str,
    kind: str,
    target: str,
    *,
    tenant_id: UUID | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write down a change. ``before`` and ``after`` hold what changed, never a secret nor the hash of one."""
    await connection.execute(
        insert(audit_log).values(
            id=uuid7(),
            actor=actor.name,
            action=action,
            kind=kind,
            target=target,
            tenant_id=tenant_id,
            before=msgspec.to_builtins(before, str_keys=True) if before is not None else None,
            after=msgspec.to_builtins(after, str_keys=True) if after is not None else None,
        )
    )
