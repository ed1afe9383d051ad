"""Answers kept for idempotency keys, erased with what else was said.

An entry tells its tenant and the request that ran, not its end user: of an end user's erasure all of the tenant's
answers go. They live for a day at most; whoever repeats a request then has it run anew.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from gateway.admission.redis import RedisClient, RedisError, RedisUnavailable
from gateway.idempotency.scope import Scope
from gateway.idempotency.store import script_of
from gateway.tenants.principal import shard_of

ERASE: Final = script_of("erase")


class IdempotentAnswers:
    """As the eraser of the prompt log has them. ``redis``: the one that holds them."""

    kind: Final = "idempotency_answers"

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
        """The request's own, else all of the tenant's, also those that still run. Raises RedisUnavailable."""
        owner = "" if request_id is None else str(request_id)
        shard = shard_of(tenant_id)
        listed = Scope(str(tenant_id), shard, "", "").keys[2]
        erased = 0
        try:
            for member in await self._redis.command("ZRANGE", listed, 0, -1):
                scope = Scope(str(tenant_id), shard, member.decode(), "")
                arguments = (self._redis.time_offset_ms, scope.hash, owner)
                erased += await self._redis.run(ERASE, scope.keys, arguments)
        except RedisError as fault:
            raise RedisUnavailable(f"{ERASE.name}: {fault}") from fault
        return erased
