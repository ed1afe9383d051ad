"""Who changed what: entries of the append-only audit log, written in the transaction of the change itself."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import insert, null, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.tables import audit_log
from gateway.ids import uuid7
from gateway.tenants.principal import AdminRole
from gateway.tenants.records import NotAllowed

_CONSOLE = "cli:"
_last_ms = 0


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change: an admin key's public id, or ``cli:`` and the operating system's user."""

    name: str
    role: AdminRole = "owner"

    @classmethod
    def at_console(cls) -> Actor:
        """The user of this process: who reaches the database from a shell may do everything."""
        uid = os.getuid()
        try:
            # Not from LOGNAME or USER, as getpass has it: whoever makes a change could name anybody there.
            user = pwd.getpwuid(uid).pw_name
        except KeyError:  # a container's user need not have a name
            user = str(uid)
        return cls(_CONSOLE + user)

    @property
    def is_console(self) -> bool:
        return self.name.startswith(_CONSOLE)

    def check_may_change(self) -> None:
        """Raises NotAllowed unless this role may change what belongs to tenants, routes or prices."""
        if self.role == "viewer":
            raise NotAllowed("a viewer's key only reads; make changes with the key of an owner or an admin")

    def check_may_manage_admins(self) -> None:
        """Raises NotAllowed unless this role may issue, change and revoke administrators' keys."""
        if self.role != "owner":
            raise NotAllowed("only an owner's key may manage administrators' keys")


@dataclass(frozen=True, slots=True)
class AuditRecord:
    id: UUID
    at: datetime
    actor: str
    action: str
    kind: str
    target: str
    """Name or id of what was changed."""
    tenant_id: UUID | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


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
            id=_next_id(),
            actor=actor.name,
            action=action,
            kind=kind,
            target=target,
            tenant_id=tenant_id,
            before=_plain(before),
            after=_plain(after),
        )
    )


def _next_id() -> UUID:
    """UUIDv7s whose milliseconds are all different, so that what this process writes is read back in order."""
    global _last_ms
    _last_ms = max(_last_ms + 1, time.time_ns() // 1_000_000)
    return uuid7(_last_ms)


def _plain(values: Mapping[str, Any] | None) -> Any:
    # Without null() it would be JSON's null.
    return null() if values is None else msgspec.to_builtins(values, str_keys=True, order="deterministic")


async def read_audit(
    connection: AsyncConnection,
    *,
    tenant_id: UUID | None = None,
    kind: str | None = None,
    actor: str | None = None,
    after: UUID | None = None,
    limit: int,
) -> list[AuditRecord]:
    """The newest first; ``after``: those older than that entry."""
    query = select(audit_log).order_by(audit_log.c.id.desc()).limit(limit)
    for column, wanted in ((audit_log.c.tenant_id, tenant_id), (audit_log.c.kind, kind), (audit_log.c.actor, actor)):
        if wanted is not None:
            query = query.where(column == wanted)
    if after is not None:
        query = query.where(audit_log.c.id < after)
    return [AuditRecord(**row._mapping) for row in await connection.execute(query)]
