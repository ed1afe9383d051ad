"""What the pipeline asks: who of the requests with one idempotency key runs, and what the others are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from uuid import UUID

import structlog

from gateway.admission.redis import RedisClient, RedisUnavailable
from gateway.answerable import Answerable
from gateway.clock import Clock
from gateway.idempotency.answers import Owned, Replay, Request
from gateway.idempotency.reading import Reading
from gateway.idempotency.scope import Scope, reused
from gateway.idempotency.share import Share
from gateway.idempotency.store import Reused, Rules, Store
from gateway.secret_key import SecretKey
from gateway.telemetry import Sampler
from worker.protocol.errors import ApiError

MAX_WAITING = 100
"""Most requests of one tenant, on one replica, that wait for answers of others."""

_log = structlog.get_logger("gateway.idempotency")


class Idempotency:
    """One per gateway process. Use as an async context manager around the time in which requests are served.

    ``redis``: a connection of its own, for answers may be long, and what is asked of it comes in order.
    """

    def __init__(self, redis: RedisClient, secret_key: SecretKey, clock: Clock, rules: Rules | None = None) -> None:
        self._redis = redis
        self._secret_key = secret_key
        self._store = Store(redis, rules or Rules())
        self._tasks = asyncio.TaskGroup()
        self._shares: set[Share] = set()
        self._waiting: Counter[str] = Counter()
        self._told = Sampler(clock)

    async def __aenter__(self) -> Idempotency:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for share in self._shares:
            share.close()
        await self._tasks.__aexit__(None, None, None)
        await self._redis.close()

    async def answer(self, scope: Scope, request: Request) -> Answerable:
        """The request's own answer, if it is the first with its key, else the first one's.

        Raises ApiError (409 for another body), RedisUnavailable, and what ``request.execute`` raises.
        """
        try:
            async with asyncio.timeout(request.patience_s):
                held = await self.claim(scope, request.id)
        except TimeoutError:
            raise RedisUnavailable("Redis did not say in time who runs") from None
        if isinstance(held, Share):
            return await self.own(held, request.execute)
        if self._waiting[scope.tenant] >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} requests wait for the answers of others with their idempotency keys. Wait for those.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        return Replay(self, scope, request, held)

    async def claim(self, scope: Scope, request_id: UUID) -> Share | Reading:
        """The share of an owner, or what a follower reads. Raises ApiError (409 for another body), RedisUnavailable."""
        try:
            owner = await self._store.begin(scope, request_id)
        except Reused:
            raise reused() from None
        except asyncio.CancelledError:
            self._store.forget(scope, request_id)
            raise
        if owner != request_id:
            return Reading(self._store, self._secret_key, scope, owner)
        share = Share(self._store, self._secret_key, scope, owner)
        self._shares.add(share)
        self._tasks.create_task(self._run(share), name=f"share {owner}")
        return share

    async def own(self, share: Share, execute: Callable[[], Awaitable[Answerable]]) -> Owned:
        try:
            return Owned(await execute(), share)
        except BaseException:
            share.drop()
            raise

    def wait(self, scope: Scope, count: int) -> None:
        """A request begins to wait (1), or ends (-1)."""
        self._waiting[scope.tenant] += count
        if not self._waiting[scope.tenant]:
            del self._waiting[scope.tenant]

    async def _run(self, share: Share) -> None:
        try:
            await share.run()
        except Exception:
            _log.exception("idempotency_share_failed", request_id=str(share.owner))
        finally:
            self._shares.discard(share)
        if share.outcome in ("NOT_KEPT", "TOO_LARGE", "FULL", "LOST"):
            times = self._told.take(share.scope.tenant, share.outcome)
            if times is not None:
                _log.warning(
                    "idempotent_answer_not_kept",
                    request_id=str(share.owner),
                    tenant_id=share.scope.tenant,
                    reason=share.outcome.lower(),
                    times=times,
                )
