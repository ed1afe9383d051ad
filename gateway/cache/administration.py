"""The answer caches of all tenants as administrators have them: purged, and asked how often they were right."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisError, RedisUnavailable, create_redis
from gateway.cache.agreement import Agreement, Agreements
from gateway.cache.purging import Purger
from gateway.cache.store import SCRIPTS, Store
from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.redis_url import NoCacheRedis
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import find_tenant

KIND: Final = "answer_cache"
"""What the audit log calls it."""
EVERYTHING: Final = "all"
MOST_DAYS: Final = 35
"""For which agreement is counted."""
_TIMEOUT_S: Final = 10.0


class Forgetful(Protocol):
    """As ``gateway.cache.service.AnswerCache`` has it. Each method raises RedisUnavailable."""

    async def purge(
        self, tenant_id: UUID, *, route: str | None = None, version: str | None = None, tag: str | None = None
    ) -> int: ...

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: str | None = None) -> int: ...

    async def agreement(self, tenant_id: UUID, *, days: int = 30) -> Agreement: ...


class CacheAdministration:
    """``cache``: None where there is no Redis for it.

    Each method raises NoCacheRedis, UnknownTenant, RedisUnavailable and DatabaseUnavailable.
    """

    def __init__(self, engine: AsyncEngine, cache: Forgetful | None) -> None:
        self._engine = engine
        self._cache = cache

    async def purge(
        self, actor: Actor, tenant: str, *, model: str | None = None, version: str | None = None, tag: str | None = None
    ) -> int:
        """Forget the tenant's answers that have all that is given; all of them, if nothing is. How many there were.

        The audit log has it before it is done. Raises NotAllowed for a viewer.
        """
        actor.check_may_change()
        cache = self._there()
        asked = {"model": model, "version": version, "tag": tag}
        after = {name: value for name, value in asked.items() if value is not None}
        async with transaction(self._engine) as connection:
            tenant_id = (await find_tenant(connection, tenant)).id
            await audit(connection, actor, "purge", KIND, model or EVERYTHING, tenant_id=tenant_id, after=after)
        return await cache.purge(tenant_id, route=model, version=version, tag=tag)

    async def agreement(self, tenant: str, *, days: int) -> Agreement:
        """How often the model agreed with what the semantic tier had for it, in the last ``days``, at most 35."""
        cache = self._there()
        async with transaction(self._engine) as connection:
            tenant_id = (await find_tenant(connection, tenant)).id
        try:
            return await cache.agreement(tenant_id, days=days)
        except RedisError as fault:
            raise RedisUnavailable(f"agreement: {fault}") from fault

    def _there(self) -> Forgetful:
        if self._cache is None:
            raise NoCacheRedis
        return self._cache


class RemoteCache:
    """The cache that gateways serve from, for a process that serves nothing. To be closed."""

    def __init__(self, url: str, secret_key: SecretKey, clock: Clock) -> None:
        self._redis = create_redis(url, timeout_s=_TIMEOUT_S, scripts=SCRIPTS, name="penstock-answers-console")
        self._purger = Purger(url, Store(self._redis), secret_key)
        self._agreements = Agreements(self._redis)
        self._clock = clock

    async def purge(
        self, tenant_id: UUID, *, route: str | None = None, version: str | None = None, tag: str | None = None
    ) -> int:
        return await self._purger.purge(tenant_id, route=route, version=version, tag=tag)

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: str | None = None) -> int:
        gone = await self._purger.purge(tenant_id, end_user=end_user, request_id=request_id)
        if end_user is None and request_id is None:
            await self._purger.erase_counts(tenant_id)
        return gone

    async def agreement(self, tenant_id: UUID, *, days: int = 30) -> Agreement:
        return await self._agreements.sum(tenant_id, self._clock.now(), days)

    async def close(self) -> None:
        await self._redis.close()
