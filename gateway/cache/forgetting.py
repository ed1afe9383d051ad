"""The answer cache as those have it who forget: beside the gateways that serve from it, or in them."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from gateway.admission.redis import create_redis
from gateway.cache.agreement import Agreement, Agreements
from gateway.cache.purging import Purger
from gateway.cache.store import SCRIPTS, Store
from gateway.clock import Clock
from gateway.secret_key import SecretKey

_TIMEOUT_S: Final = 10.0


class Forgetful(Protocol):
    """As ``gateway.cache.service.AnswerCache`` has it. Each method raises RedisUnavailable."""

    async def purge(
        self, tenant_id: UUID, *, route: str | None = None, version: str | None = None, tag: str | None = None
    ) -> int: ...

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: str | None = None) -> int: ...

    async def agreement(self, tenant_id: UUID, *, days: int = 30) -> Agreement: ...


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
