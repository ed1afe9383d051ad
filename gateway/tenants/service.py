"""Tenants and their keys: who is calling, and the changes an administrator makes."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import Row, Select, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.tables import api_keys, budgets, projects, tenants
from gateway.ids import uuid7
from gateway.tenants.key_cache import KeyCache, StoredKey
from gateway.tenants.keys import generate_key, parse_key, secret_matches
from gateway.tenants.principal import Budget, Limits, Principal
from gateway.tenants.records import (
    InvalidKey,
    KeyRecord,
    TenantExists,
    TenantRecord,
    UnknownKey,
    UnknownTenant,
    check_expiry,
    check_limits,
    check_name,
    check_scopes,
    is_name,
)

Announce = Callable[[UUID, int], Awaitable[None]]
"""Tells every replica, through Redis, that a tenant's configuration has reached a generation."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of an admin's key."""

    key_id: str
    name: str


class Tenants:
    """Verifies keys (from a short-lived cache) and changes tenants, keys and limits (in Postgres, then announced).

    Every change of a tenant increments its generation in the same transaction. Admission compares generations on each
    request, so a change that was announced is in force at once; one whose announcement was lost, within ``cache_s``.
    """

    def __init__(
        self, engine: AsyncEngine, clock: Clock, *, cache_s: float = 5.0, announce: Announce | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._announce = announce
        self._cache: KeyCache[Principal | AdminPrincipal] = KeyCache(clock, self._read_key, cache_s=cache_s)

    # Verification

    async def authenticate(self, key_text: str | None) -> Principal:
        """The tenant's principal behind a key. Raises InvalidKey, DatabaseUnavailable."""
        return self._tenant_principal(await self._verify(key_text))

    async def reload(self, key_text: str | None, *, at_least: int | None = None) -> Principal:
        """As ``authenticate``, past the cache: for when admission found the principal stale.

        ``at_least``: the generation that made it stale; a cached principal that is as new will do, so that a crowd of
        stale requests asks Postgres once.
        """
        return self._tenant_principal(await self._verify(key_text, reload=True, at_least=at_least))

    async def authenticate_admin(self, key_text: str | None) -> AdminPrincipal:
        """The administrator behind a key. Raises InvalidKey, DatabaseUnavailable."""
        principal = (await self._verify(key_text)).principal
        if not isinstance(principal, AdminPrincipal):
            raise InvalidKey
        return principal

    async def _verify(
        self, key_text: str | None, *, reload: bool = False, at_least: int | None = None
    ) -> StoredKey[Principal | AdminPrincipal]:
        parsed = parse_key(key_text) if key_text else None
        if parsed is None:
            raise InvalidKey
        public_id, secret = parsed
        if reload:
            stored = await self._cache.reload(public_id, at_least=at_least)
        else:
            stored = await self._cache.get(public_id)
        if stored is None or not secret_matches(secret, stored.secret_sha256):
            raise InvalidKey
        return stored

    @staticmethod
    def _tenant_principal(stored: StoredKey[Principal | AdminPrincipal]) -> Principal:
        if not isinstance(stored.principal, Principal):
            raise InvalidKey
        return stored.principal

    async def _read_key(self, public_id: str) -> StoredKey[Principal | AdminPrincipal] | None:
        query = (
            select(
                api_keys,
                tenants.c.name.label("tenant_name"),
                tenants.c.generation,
                tenants.c.salt,
                projects.c.name.label("project_name"),
                *_LIMITS,
            )
            .select_from(
                api_keys.outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id)
                .outerjoin(projects, projects.c.id == api_keys.c.project_id)
                .outerjoin(budgets, budgets.c.tenant_id == tenants.c.id)
            )
            .where(api_keys.c.public_id == public_id, api_keys.c.revoked_at.is_(None))
        )
        async with transaction(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        principal: Principal | AdminPrincipal
        if row.tenant_id is None:
            principal = AdminPrincipal(row.public_id, row.name)
        else:
            principal = Principal(
                tenant_id=row.tenant_id,
                tenant_name=row.tenant_name,
                key_id=row.public_id,
                scopes=frozenset(row.scopes),
                limits=_limits(row),
                generation=row.generation,
                salt=row.salt,
                allowed_models=None if row.allowed_models is None else frozenset(row.allowed_models),
                project_id=row.project_id,
                project_name=row.project_name,
            )
        return StoredKey(principal, row.secret_sha256, row.expires_at, row.generation or 0)

    # Tenants

    async def create_tenant(self, name: str, limits: Limits | None = None) -> TenantRecord:
        """Raises TenantExists, ConfigurationError."""
        limits = check_limits(limits or Limits())
        tenant_id = uuid7()
        values = {
            "id": tenant_id,
            "name": check_name("tenant", name),
            "salt": secrets.token_hex(16),
            "requests_per_minute": limits.requests_per_minute,
            "max_concurrent": limits.max_concurrent,
        }
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(insert(tenants).values(values))
                await connection.execute(insert(projects).values(id=uuid7(), tenant_id=tenant_id, name="default"))
                await _write_budget(connection, tenant_id, limits.budget)
                record = await _tenant(connection, name)
        except IntegrityError as fault:
            raise TenantExists(name) from fault
        await self._tell(record.id, record.generation)
        return record

    async def tenant(self, name: str) -> TenantRecord:
        """Raises UnknownTenant."""
        async with transaction(self._engine) as connection:
            return await _tenant(connection, name)

    async def list_tenants(self) -> list[TenantRecord]:
        """By name."""
        async with transaction(self._engine) as connection:
            rows = await connection.execute(_tenant_query().order_by(tenants.c.name))
            return [_tenant_record(row) for row in rows]

    async def set_limits(self, name: str, change: Limits | Callable[[Limits], Limits]) -> TenantRecord:
        """Replace a tenant's limits, or change them by a function of those in force (two changes at once both count).

        Raises UnknownTenant, ConfigurationError.
        """
        async with transaction(self._engine) as connection:
            record = await _tenant(connection, name, lock=True)
            limits = check_limits(change if isinstance(change, Limits) else change(record.limits))
            await connection.execute(
                update(tenants)
                .where(tenants.c.id == record.id)
                .values(requests_per_minute=limits.requests_per_minute, max_concurrent=limits.max_concurrent)
            )
            await _write_budget(connection, record.id, limits.budget)
            generation = await _next_generation(connection, record.id)
        self._cache.forget_tenant(lambda principal: _belongs(principal, record.id))
        await self._tell(record.id, generation)
        return replace(record, limits=limits, generation=generation)

    # Keys

    async def create_key(
        self,
        tenant: str,
        name: str,
        *,
        scopes: Collection[str] = frozenset({"inference"}),
        expires_at: datetime | None = None,
        allowed_models: Collection[str] | None = None,
    ) -> tuple[str, KeyRecord]:
        """The key's text, which nobody will see again, and its record. Raises UnknownTenant, ConfigurationError."""
        new = generate_key()
        values = {
            "public_id": new.public_id,
            "name": check_name("key", name),
            "secret_sha256": new.secret_sha256,
            "scopes": sorted(check_scopes(frozenset(scopes))),
            "allowed_models": None if allowed_models is None else sorted(_checked_names(allowed_models)),
            "expires_at": check_expiry(expires_at, self._clock.now()),
        }
        async with transaction(self._engine) as connection:
            owner = await _tenant(connection, tenant, lock=True)
            project = await connection.scalar(
                select(projects.c.id).where(projects.c.tenant_id == owner.id, projects.c.name == "default")
            )
            query = insert(api_keys).values(**values, tenant_id=owner.id, project_id=project).returning(api_keys)
            row = (await connection.execute(query)).one()
            generation = await _next_generation(connection, owner.id)
        self._cache.forget(new.public_id)
        await self._tell(owner.id, generation)
        return new.text, _key_record(row)

    async def create_admin_key(
        self, name: str = "admin", *, expires_at: datetime | None = None
    ) -> tuple[str, KeyRecord]:
        """A key for ``/admin``, of no tenant. Raises ConfigurationError."""
        new = generate_key()
        query = (
            insert(api_keys)
            .values(
                public_id=new.public_id,
                name=check_name("key", name),
                secret_sha256=new.secret_sha256,
                scopes=["admin"],
                role="owner",
                expires_at=check_expiry(expires_at, self._clock.now()),
            )
            .returning(api_keys)
        )
        async with transaction(self._engine) as connection:
            return new.text, _key_record((await connection.execute(query)).one())

    async def list_keys(self, tenant: str | None = None) -> list[KeyRecord]:
        """A tenant's keys, oldest first; without a tenant, the admins' keys. Raises UnknownTenant."""
        async with transaction(self._engine) as connection:
            owner = None if tenant is None else (await _tenant(connection, tenant)).id
            query = select(api_keys).where(api_keys.c.tenant_id.is_not_distinct_from(owner))
            rows = await connection.execute(query.order_by(api_keys.c.created_at, api_keys.c.public_id))
            return [_key_record(row) for row in rows]

    async def revoke_key(self, public_id: str) -> KeyRecord:
        """End a key. Revoking it again changes nothing. Raises UnknownKey."""
        if not is_name(public_id):
            raise UnknownKey(public_id)
        async with transaction(self._engine) as connection:
            query = (
                update(api_keys)
                .where(api_keys.c.public_id == public_id)
                .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.now()))
                .returning(api_keys)
            )
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise UnknownKey(public_id)
            record = _key_record(row)
            generation = None if record.tenant_id is None else await _next_generation(connection, record.tenant_id)
        self._cache.forget(public_id)
        if record.tenant_id is not None and generation is not None:
            await self._tell(record.tenant_id, generation)
        return record

    async def _tell(self, tenant_id: UUID, generation: int) -> None:
        if self._announce is None:
            return
        try:
            await self._announce(tenant_id, generation)
        except Exception as fault:
            # The change is committed and comes into force without the announcement when caches expire: not an error
            # of whoever made it.
            _log.warning("generation_not_announced", tenant_id=str(tenant_id), generation=generation, error=repr(fault))


_LIMITS = (
    tenants.c.requests_per_minute,
    tenants.c.max_concurrent,
    budgets.c.amount_nano_usd,
    budgets.c.period,
    budgets.c.timezone,
)


def _limits(row: Row[Any]) -> Limits:
    budget = None if row.amount_nano_usd is None else Budget(row.amount_nano_usd, row.period, row.timezone)
    return Limits(row.requests_per_minute, row.max_concurrent, budget)


def _checked_names(routes: Collection[str]) -> set[str]:
    return {check_name("route", route) for route in routes}


def _belongs(principal: Principal | AdminPrincipal, tenant_id: UUID) -> bool:
    return isinstance(principal, Principal) and principal.tenant_id == tenant_id


def _tenant_query() -> Select[Any]:
    return select(tenants.c.id, tenants.c.name, tenants.c.generation, tenants.c.created_at, *_LIMITS).select_from(
        tenants.outerjoin(budgets)
    )


def _tenant_record(row: Row[Any]) -> TenantRecord:
    return TenantRecord(row.id, row.name, row.generation, _limits(row), row.created_at)


async def _tenant(connection: AsyncConnection, name: str, *, lock: bool = False) -> TenantRecord:
    query = _tenant_query().where(tenants.c.name == name)
    if lock:
        query = query.with_for_update(of=tenants)
    row = (await connection.execute(query)).one_or_none() if is_name(name) else None
    if row is None:
        raise UnknownTenant(name)
    return _tenant_record(row)


async def _next_generation(connection: AsyncConnection, tenant_id: UUID) -> int:
    query = (
        update(tenants)
        .where(tenants.c.id == tenant_id)
        .values(generation=tenants.c.generation + 1)
        .returning(tenants.c.generation)
    )
    return int((await connection.execute(query)).scalar_one())


async def _write_budget(connection: AsyncConnection, tenant_id: UUID, budget: Budget | None) -> None:
    if budget is None:
        await connection.execute(delete(budgets).where(budgets.c.tenant_id == tenant_id))
        return
    values = {"amount_nano_usd": budget.amount, "period": budget.period, "timezone": budget.timezone}
    await connection.execute(
        upsert(budgets)
        .values(tenant_id=tenant_id, **values)
        .on_conflict_do_update(index_elements=[budgets.c.tenant_id], set_=values)
    )


def _key_record(row: Row[Any]) -> KeyRecord:
    return KeyRecord(
        public_id=row.public_id,
        tenant_id=row.tenant_id,
        name=row.name,
        scopes=frozenset(row.scopes),
        allowed_models=None if row.allowed_models is None else frozenset(row.allowed_models),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
