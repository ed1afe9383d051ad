"""The answer caches of all tenants as administrators have them: purged, and asked how often they were right."""

from __future__ import annotations

from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisError, RedisUnavailable
from gateway.cache.agreement import Agreement
from gateway.cache.forgetting import Forgetful
from gateway.db.engine import transaction
from gateway.redis_url import NoCacheRedis
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import find_tenant

KIND: Final = "answer_cache"
"""What the audit log calls it."""
EVERYTHING: Final = "all"
MOST_DAYS: Final = 35
"""For which agreement is counted."""


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
