"""Logs brought to their tenants' retention, again and again, by any replica: also those into which nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final
from uuid import UUID

import structlog

from gateway.admission.redis import RedisClient, RedisUnavailable
from gateway.db.engine import DatabaseUnavailable
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.store import Store

INTERVAL_S: Final = 60.0
_log = structlog.get_logger(__name__)


class Retention:
    """An async context manager. ``policies``: those that hold now, by tenant; who has none is left alone. It may raise
    DatabaseUnavailable. ``redis``: a connection of its own, which is closed at the end.
    """

    def __init__(
        self,
        redis: RedisClient,
        policies: Callable[[], Awaitable[Mapping[UUID, PromptLogPolicy]]],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._redis = redis
        self._store = Store(redis)
        self._policies = policies
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Retention:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prompt-log-retention")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._redis.close()

    async def sweep(self) -> int:
        """Once, through all logs; returns how many entries went. Raises RedisUnavailable, DatabaseUnavailable."""
        policies = await self._policies()
        trimmed = 0
        for tenant_id in await self._store.tenants():
            policy = policies.get(tenant_id)
            if policy is not None:
                trimmed += await self._store.trim(tenant_id, policy)
        return trimmed

    async def _run(self) -> None:
        while True:
            try:
                trimmed = await self.sweep()
                if trimmed:
                    _log.info("prompt_log_trimmed", count=trimmed)
            except (RedisUnavailable, DatabaseUnavailable) as fault:
                _log.warning("prompt_log_retention_failed", error=str(fault))
            except Exception:
                _log.exception("prompt_log_retention_failed")
            await asyncio.sleep(self._interval_s)
