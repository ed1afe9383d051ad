"""Expired responses are removed in small batches, by any replica; they cannot be found from the moment they expire."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import TracebackType

import structlog
from sqlalchemy import delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import stored_responses

BATCH = 200
INTERVAL_S = 600.0
_log = structlog.get_logger(__name__)


async def remove_expired(engine: AsyncEngine, now: datetime) -> int:
    """Returns how many there were. Raises DatabaseUnavailable."""
    removed = 0
    while True:
        async with transaction(engine) as connection:
            place = (stored_responses.c.tenant_id, stored_responses.c.id)
            # Replicas that work at the same time take different rows.
            batch = (
                select(*place)
                .where(stored_responses.c.expires_at <= now)
                .limit(BATCH)
                .with_for_update(skip_locked=True)
            )
            found = (await connection.execute(delete(stored_responses).where(tuple_(*place).in_(batch)))).rowcount
        removed += found
        if found < BATCH:
            return removed


class ResponseRetention:
    """An async context manager that removes what expired, again and again. Postgres may be away."""

    def __init__(self, engine: AsyncEngine, clock: Clock, *, interval_s: float = INTERVAL_S) -> None:
        self._engine = engine
        self._clock = clock
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ResponseRetention:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="response-retention")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                removed = await remove_expired(self._engine, self._clock.now())
                if removed:
                    _log.info("expired_responses_removed", count=removed)
            except DatabaseUnavailable as fault:
                _log.warning("response_retention_failed", error=str(fault))
            except Exception:
                _log.exception("response_retention_failed")
            await asyncio.sleep(self._interval_s)
