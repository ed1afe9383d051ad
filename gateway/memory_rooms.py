"""What ``gateway.memory`` stands on, built from the settings: data keys, the answer cache, and the prompt log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, cast
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisClient, create_redis
from gateway.assembly import describe
from gateway.cache import guards
from gateway.cache.local_embedder import EmbedderUnavailable, LocalEmbedder
from gateway.cache.parts import Guards
from gateway.cache.service import AnswerCache
from gateway.clock import Clock
from gateway.datakeys.master_keys import MasterKeys
from gateway.datakeys.service import DataKeys
from gateway.db.engine import transaction
from gateway.db.tables import tenants
from gateway.observability.metrics import Metrics
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.eraser import Erasable, Eraser
from gateway.promptlog.log import PromptLog
from gateway.promptlog.reader import Reader
from gateway.promptlog.retention import Retention
from gateway.promptlog.store import SCRIPTS
from gateway.redaction import Redactor
from gateway.redis_url import cache_url
from gateway.secret_key import SecretKey
from gateway.settings import Settings

TIMEOUT_S: Final = 2.0
"""For one answer of Redis to the prompt log, for which no client waits."""
_log = structlog.get_logger(__name__)


class MemoryRooms:
    """An async context manager around the time in which requests are served. ``cache`` and ``log`` are None where there
    is no Redis for them."""

    def __init__(
        self, settings: Settings, engine: AsyncEngine, secret_key: SecretKey, clock: Clock, metrics: Metrics
    ) -> None:
        assert settings.secret_key is not None
        self._engine = engine
        self._clock = clock
        self._open = AsyncExitStack()
        masters = MasterKeys.configured(settings.secret_key, settings.master_key, settings.previous_master_key)
        self.data_keys = DataKeys(engine, masters, clock)
        self._url = cache_url(settings.cache_redis_url, settings.redis_url)
        self._embedder: LocalEmbedder | None = None
        self.without_embedder: str | None = None
        """Why meanings are not compared."""
        self.cache: AnswerCache | None = None
        self.log: PromptLog | None = None
        self.reader: Reader | None = None
        self._retention: Retention | None = None
        self._clients: list[RedisClient] = []
        if self._url is None:
            return
        try:
            self._embedder = LocalEmbedder()
        except EmbedderUnavailable as fault:
            self.without_embedder = str(fault)
        self.cache = AnswerCache(
            self._url,
            secret_key,
            self.data_keys,
            cast("Guards", guards),  # mypy takes no package for a protocol
            describe,
            embedder=self._embedder,
            clock=clock,
            counter=metrics,
        )
        self.log = PromptLog(self._client(), self.data_keys, clock, Redactor, lost=metrics.log_lost)
        self.reader = Reader(self._client(), self.data_keys, clock, Redactor)
        self._retention = Retention(self._client(), self._policies)

    def eraser(self, others: Sequence[Erasable]) -> Eraser | None:
        return None if self._url is None else Eraser(self._client(), self.data_keys, self._clock, others)

    async def notes(self) -> Mapping[str, str]:
        """What readiness tells of it."""
        if self.cache is None:
            return {"answer_cache": "off: set CACHE_REDIS_URL", "prompt_log": "off: set CACHE_REDIS_URL"}
        return {"answer_cache": await self.cache.fault() or "ok", "semantic_cache": self._semantic(self.cache)}

    def _semantic(self, cache: AnswerCache) -> str:
        if self.without_embedder is not None:
            return f"off: {self.without_embedder}"
        if cache.semantic_available is None:
            return "not known yet"
        return "ok" if cache.semantic_available else f"off: {cache.semantic_fault}"

    async def __aenter__(self) -> MemoryRooms:
        await self._open.enter_async_context(self.data_keys)
        for room in (self._embedder, self.cache, self.log, self._retention):
            if room is not None:
                await self._open.enter_async_context(room)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()
        for client in self._clients:
            await client.close()

    def _client(self) -> RedisClient:
        assert self._url is not None
        client = create_redis(self._url, timeout_s=TIMEOUT_S, scripts=SCRIPTS, name="penstock-prompts")
        self._clients.append(client)
        return client

    async def _policies(self) -> Mapping[UUID, PromptLogPolicy]:
        """Those of all tenants. Raises DatabaseUnavailable."""
        async with transaction(self._engine) as connection:
            rows = await connection.execute(select(tenants.c.id, tenants.c.prompt_log))
            return dict(_understood((row.id, row.prompt_log) for row in rows))


def _understood(policies: Iterable[tuple[UUID, Any]]) -> Iterator[tuple[UUID, PromptLogPolicy]]:
    """A later release may have written what this one does not know: that costs no other tenant its retention."""
    for tenant_id, policy in policies:
        try:
            yield tenant_id, msgspec.convert(policy, PromptLogPolicy)
        except msgspec.ValidationError as fault:
            _log.warning("prompt_log_policy_not_understood", tenant_id=str(tenant_id), error=str(fault))
