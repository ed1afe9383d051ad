"""The drainer when Postgres or Redis is away, killed or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
import redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing import drainer as drainer_module
from gateway.billing.drainer import Drainer
from gateway.clock import SystemClock
from gateway.db.engine import DatabaseUnavailable
from gateway.db.migrate import upgrade
from gateway.local.services import EmbeddedPostgres
from tests.gateway.billing.support import (
    SHARD,
    Stream,
    assert_consistent,
    eventually,
    fetch,
    full_event,
    rows_of,
    running,
    usage_event,
)
from tests.gateway.db.support import opened


async def test_postgres_may_go_away_under_load_and_come_back(
    services_dir: Path, redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer_module, "MAX_BACKOFF_S", 0.2)
    service = EmbeddedPostgres(services_dir)
    service.start()
    upgrade(service.url)
    streams = [Stream(client, f"{{s{number:02d}}}") for number in range(4)]
    sent: list[UUID] = []

    def settle(count: int) -> None:
        """Requests of several tenants end."""
        for number, stream in enumerate(streams):
            events = [
                full_event(tenant_id=UUID(int=number), admitted_at=datetime.now(UTC), backend=f"w{at % 3}")
                for at in range(count // len(streams))
            ]
            stream.add_all(events)
            sent.extend(event.request_id for event in events)

    try:
        async with opened(service.url) as engine, running(engine, redis_url) as drainer:
            settle(400)
            await eventually(engine, 100)
            service.kill()
            for _ in range(10):
                settle(400)
                await asyncio.sleep(0.02)
            with pytest.raises(DatabaseUnavailable):
                await drainer.drain_once()
            streams[1].add(b"poison")
            assert sum(map(len, streams)) > 4000
            service.start()
            settle(400)
            async with asyncio.timeout(60):
                while any(map(len, streams)):  # noqa: ASYNC110 - Redis tells no event
                    await asyncio.sleep(0.02)
            assert [row["request_id"] for row in await rows_of(engine)] == sorted(sent)
            assert len(await fetch(engine, "SELECT 1 FROM dead_usage_events")) == 1
            await assert_consistent(engine)
    finally:
        service.stop()


async def test_redis_may_be_away_at_first_and_at_the_end(engine: AsyncEngine, tmp_path: Path) -> None:
    drainer = Drainer(engine, f"unix://{tmp_path}/none.sock", SystemClock(), interval_s=0.01)
    await drainer.start()
    await asyncio.sleep(0.05)
    await drainer.close()


async def test_closing_does_not_wait_for_a_postgres_that_hangs(
    services_dir: Path, redis_url: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer_module, "CLOSE_TIMEOUT_S", 0.3)
    service = EmbeddedPostgres(services_dir, durable=False)
    service.start()
    upgrade(service.url)
    assert service.process is not None
    group = [service.process.pid, *_descendants(service.process.pid)]
    try:
        async with opened(service.url) as engine:
            drainer = Drainer(engine, redis_url, SystemClock(), interval_s=0.01)
            await drainer.start()
            stream.add(usage_event(admitted_at=datetime.now(UTC)))
            await eventually(engine, 1)
            group = [service.process.pid, *_descendants(service.process.pid)]
            for pid in group:
                os.kill(pid, signal.SIGSTOP)
            stream.add(usage_event(admitted_at=datetime.now(UTC)))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(5):
                await drainer.close()
            assert len(stream) == 1
            for pid in group:
                os.kill(pid, signal.SIGCONT)
            again = Drainer(engine, redis_url, SystemClock())
            stream.client.delete(f"{SHARD}:drainer")
            async with asyncio.timeout(20):
                await again.drain_once()
            assert len(await rows_of(engine)) == 2
            await again.close()
    finally:
        for pid in group:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        service.stop()


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in children for found in (int(child), *_descendants(int(child)))]
