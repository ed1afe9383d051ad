"""What changes have in common: one transaction under the tenant's lock, an audit entry in it, and word of it after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import ColumnElement, Row, Table, false, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.tables import tenants
from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.policies.stored import read_policy
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor, audit
from gateway.tenants.records import (
    StateConflict,
    TenantRecord,
    UnknownTenant,
    VersionConflict,
    as_id,
    is_name,
)

Announce = Callable[[UUID, int], Awaitable[None]]
"""Tells every replica, through Redis, that a tenant's configuration has reached a generation."""
Forget = Callable[[UUID | None], None]
"""Makes this process read the keys of a tenant (None: of administrators) anew."""

_log = structlog.get_logger(__name__)
# Neither the salt nor the sealed secret of the webhook is anybody's to see.
TENANT_COLUMNS = (
    tenants.c.id,
    tenants.c.name,
    tenants.c.version,
    tenants.c.generation,
    tenants.c.created_at,
    tenants.c.archived_at,
    tenants.c.timezone,
    tenants.c.redis_loss,
    tenants.c.markup_bp,
    tenants.c.weight,
    tenants.c.webhook_url,
    tenants.c.answer_cache,
    tenants.c.prompt_log,
)


@dataclass(slots=True)
class Change:
    """A change of one tenant under way: its transaction holds the tenant's row locked."""

    connection: AsyncConnection
    actor: Actor
    tenant: TenantRecord
    """As it was before."""
    made: bool = field(default=False, init=False)
    """Whether anything was changed in fact."""
    generation: int = field(default=0, init=False)
    """After the change, once it is committed."""

    async def audit(
        self,
        action: str,
        kind: str,
        target: str,
        *,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the change down, and have the tenant's generation raised for it."""
        self.made = True
        await audit(
            self.connection, self.actor, action, kind, target, tenant_id=self.tenant.id, before=before, after=after
        )


class Changes:
    """``announce``: told after each change of a tenant. ``forget``: empties this process' own cache of keys.

    ``secret_key``: hashes end users and seals the secrets of webhooks; without it neither can be changed.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        clock: Clock,
        *,
        secret_key: SecretKey | None = None,
        announce: Announce | None = None,
        forget: Forget | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._secret_key = secret_key
        self._announce = announce
        self._forget = forget

    @asynccontextmanager
    async def _changing(self, actor: Actor, ref: str | UUID) -> AsyncIterator[Change]:
        """Raises NotAllowed, UnknownTenant, StateConflict if the tenant is archived, DatabaseUnavailable."""
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            change = Change(connection, actor, await find_tenant(connection, ref, lock=True))
            if change.tenant.archived_at is not None:
                raise StateConflict(f"tenant {change.tenant.name!r} is archived; nothing of it can be changed")
            yield change
            change.generation = change.tenant.generation
            if change.made:
                change.generation = await next_generation(connection, change.tenant.id)
        if change.made:
            await self._tell(change.tenant.id, change.generation)

    async def _tell(self, tenant_id: UUID, generation: int) -> None:
        if self._forget is not None:
            self._forget(tenant_id)
        if self._announce is None:
            return
        try:
            await self._announce(tenant_id, generation)
        except Exception as fault:
            # The change is committed and comes into force without the announcement when caches expire: not an error
            # of whoever made it.
            _log.warning("generation_not_announced", tenant_id=str(tenant_id), generation=generation, error=repr(fault))


async def find_tenant(connection: AsyncConnection, ref: str | UUID, *, lock: bool = False) -> TenantRecord:
    """By name or id. Raises UnknownTenant."""
    query = select(*TENANT_COLUMNS).where(named(tenants, ref))
    if lock:
        # Not FOR UPDATE: rows of other tables that only refer to the tenant may be written meanwhile.
        query = query.with_for_update(of=tenants, key_share=True)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise UnknownTenant(ref)
    return tenant_record(row)


def named(table: Table, ref: str | UUID) -> ColumnElement[bool]:
    """Whether a row has this id or name."""
    if (id_ := as_id(ref)) is not None:
        return table.c.id == id_
    return table.c.name == ref if is_name(str(ref)) else false()


def tenant_record(row: Row[*tuple[Any, ...]]) -> TenantRecord:
    values = dict(row._mapping)
    values["answer_cache"] = read_policy(values["answer_cache"], CachePolicy)
    values["prompt_log"] = read_policy(values["prompt_log"], PromptLogPolicy)
    return TenantRecord(**values)


def columns(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as their columns take them: a policy as what differs in it from the usual."""
    return {name: msgspec.to_builtins(v) if isinstance(v, msgspec.Struct) else v for name, v in values.items()}


async def next_generation(connection: AsyncConnection, tenant_id: UUID) -> int:
    query = (
        update(tenants)
        .where(tenants.c.id == tenant_id)
        .values(generation=tenants.c.generation + 1)
        .returning(tenants.c.generation)
    )
    return int((await connection.execute(query)).scalar_one())


def check_version(kind: str, target: str, expected: int | None, found: int | None) -> None:
    """Raises VersionConflict unless it is the version that the caller read; None: whatever it is."""
    if expected is not None and expected != found:
        raise VersionConflict(kind, target, expected, found)
