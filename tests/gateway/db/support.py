"""Time that a test sets, and an engine that a test closes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import create_engine


@dataclass
class ManualClock:
    """Stands still until it is moved."""

    time: datetime = datetime(2024, 6, 3, 12, 0, tzinfo=UTC)
    ticks: float = 1000.0

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.ticks

    def advance(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)
        self.ticks += seconds


@asynccontextmanager
async def opened(url: str, *, pool_size: int = 10) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(url, pool_size=pool_size)
    try:
        yield engine
    finally:
        await engine.dispose()
