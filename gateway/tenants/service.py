"""Who is calling: keys verified, from a copy of what Postgres has that is a few seconds old at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import BindParameter, Row, Select, Text, and_, bindparam, cast, func, or_, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.tables import api_keys, limits, projects, tenants
from gateway.policies.answer_cache import CachePolicy, merge
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.policies.stored import read_policy
from gateway.tenants.key_cache import KeyCache, StoredKey
from gateway.tenants.keys import Known, matches_either
from gateway.tenants.principal import (
    AdminRole,
    BudgetPeriod,
    Limit,
    Metric,
    Principal,
    RateWindow,
    Subject,
)
from gateway.tenants.records import InvalidKey


@dataclass(frozen=True, slots=True)
class AdminPrincipal:
    """The holder of an administrator's key."""

    key_id: str
    name: str
    role: AdminRole


class Tenants:
    """Verifies keys, from a cache that trusts what it read for ``cache_s``. ``Directory`` changes them.

    Admission compares the principal's generation with the announced one on each request and asks for ``reload``, so a
    change that was announced is in force at once, on every replica; one whose announcement was lost within ``cache_s``.
    """

    def __init__(self, engine: AsyncEngine, clock: Clock, *, cache_s: float = 5.0) -> None:
        self._engine = engine
        self._clock = clock
        self._cache: KeyCache[Principal | AdminPrincipal] = KeyCache(clock, self._read_key, cache_s=cache_s)
        self._known = Known()

    async def authenticate(self, key_text: str | None, *, or_old: bool = False) -> Principal:
        """The tenant's principal behind a key. Raises InvalidKey, DatabaseUnavailable.

        ``or_old``: while Postgres is away, one that was good within the last hour. For requests that pass admission,
        which notices what was announced since: a single read that fails must not bring a revoked key back to life.
        """
        return self._tenant_principal(await self._verify(key_text, or_old=or_old))

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

    def forget(self, tenant_id: UUID | None) -> None:
        """Read the keys of a tenant (None: of administrators) anew: this process has just changed them."""
        self._cache.forget_tenant(lambda principal: _tenant_of(principal) == tenant_id)

    async def _verify(
        self, key_text: str | None, *, reload: bool = False, at_least: int | None = None, or_old: bool = False
    ) -> StoredKey[Principal | AdminPrincipal]:
        found = self._known.find(key_text) if key_text else None
        if key_text is None or found is None:
            raise InvalidKey
        public_id, hashed = found
        if reload:
            stored = await self._cache.reload(public_id, at_least=at_least)
        else:
            stored = await self._cache.get(public_id, or_old=or_old)
        # A key that is not there is compared, too: it must not be told by the time that the answer takes.
        good = matches_either(
            hashed,
            stored.secret_sha256 if stored else _NO_SECRET,
            stored.previous_secret_sha256 if stored and self._in_grace(stored) else None,
        )
        if stored is None or not good:
            self._known.forget(key_text)
            raise InvalidKey
        self._known.keep(key_text, found)
        return stored

    def _in_grace(self, stored: StoredKey[Principal | AdminPrincipal]) -> bool:
        return stored.previous_until is not None and self._clock.now() < stored.previous_until

    @staticmethod
    def _tenant_principal(stored: StoredKey[Principal | AdminPrincipal]) -> Principal:
        if not isinstance(stored.principal, Principal):
            raise InvalidKey
        return stored.principal

    async def _read_key(self, public_id: str) -> StoredKey[Principal | AdminPrincipal] | None:
        async with transaction(self._engine) as connection:
            given = {"public_id": public_id, "now": self._clock.now()}
            row = (await connection.execute(_KEY, given)).one_or_none()
        if row is None:
            return None
        principal = _admin(row) if row.tenant_id is None else _principal(row)
        return StoredKey(
            principal,
            row.secret_sha256,
            row.expires_at,
            row.generation or 0,
            row.previous_secret_sha256,
            row.previous_until,
        )


_NO_SECRET = bytes(32)


def _key_query() -> Select[Any]:
    """All about one key in one query. What is revoked, expired or archived is not found, as if it never was."""
    public_id: BindParameter[str] = bindparam("public_id", type_=Text)
    fields = (
        limits.c.id,
        limits.c.subject,
        limits.c.target,
        limits.c.metric,
        func.nullif(limits.c.window, ""),
        limits.c.amount,
        limits.c.hard,
        limits.c.thresholds,
    )
    bearing = (
        select(cast(func.json_agg(aggregate_order_by(func.json_build_array(*fields), limits.c.id)), Text))
        .where(
            limits.c.tenant_id == api_keys.c.tenant_id,
            or_(
                limits.c.subject.in_(("tenant", "end_user", "model")),
                and_(limits.c.subject == "project", limits.c.target == cast(api_keys.c.project_id, Text)),
                and_(limits.c.subject == "key", limits.c.target == api_keys.c.public_id),
            ),
        )
        .correlate(api_keys)
        .scalar_subquery()
    )
    return (
        select(
            api_keys,
            tenants.c.name.label("tenant_name"),
            tenants.c.generation,
            tenants.c.salt,
            tenants.c.timezone,
            tenants.c.redis_loss,
            tenants.c.markup_bp,
            tenants.c.weight,
            tenants.c.answer_cache,
            tenants.c.prompt_log,
            projects.c.name.label("project_name"),
            projects.c.answer_cache.label("project_cache"),
            bearing.label("limits"),
        )
        .select_from(
            api_keys.outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id).outerjoin(
                projects, projects.c.id == api_keys.c.project_id
            )
        )
        .where(
            api_keys.c.public_id == public_id,
            api_keys.c.revoked_at.is_(None),
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > bindparam("now")),
            tenants.c.archived_at.is_(None),
            projects.c.archived_at.is_(None),
        )
    )


_KEY = _key_query()
_LimitRow = tuple[UUID, Subject, str, Metric, RateWindow | BudgetPeriod | None, int, bool, tuple[int, ...]]
_limit_rows = msgspec.json.Decoder(list[_LimitRow])


def _admin(row: Row[Any]) -> AdminPrincipal:
    return AdminPrincipal(row.public_id, row.name, row.role)


def _principal(row: Row[Any]) -> Principal:
    found = tuple(Limit(*values) for values in _limit_rows.decode(row.limits or "[]"))
    return Principal(
        tenant_id=row.tenant_id,
        tenant_name=row.tenant_name,
        key_id=row.public_id,
        scopes=frozenset(row.scopes),
        generation=row.generation,
        salt=row.salt,
        allowed_models=None if row.allowed_models is None else frozenset(row.allowed_models),
        project_id=row.project_id,
        project_name=row.project_name,
        timezone=row.timezone,
        tenant_limits=found,
        max_context_tokens=row.max_context_tokens,
        max_output_tokens=row.max_output_tokens,
        redis_loss=row.redis_loss,
        markup_bp=row.markup_bp,
        weight=row.weight,
        answer_cache=merge(read_policy(row.answer_cache, CachePolicy), read_policy(row.project_cache, CachePolicy)),
        prompt_log=read_policy(row.prompt_log, PromptLogPolicy),
    )


def _tenant_of(principal: Principal | AdminPrincipal) -> UUID | None:
    return principal.tenant_id if isinstance(principal, Principal) else None
