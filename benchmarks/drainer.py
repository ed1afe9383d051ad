"""How many usage events a second one drainer moves from Redis into the ledger.

    python benchmarks/drainer.py [--events 20000] [--shards 8] [--tenants 50] [--plain] [--runs 3]

Starts a Postgres (durable, as in production) and a Redis of its own. Every event says all that an event can say, with
``--plain`` only what it must. Prints one line a run; CPU is the drainer's process alone, of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import package_first  # noqa: F401
import redis

from gateway.billing.drainer import Drainer
from gateway.billing.usage import UsageEvent
from gateway.clock import SystemClock
from gateway.db.engine import create_engine
from gateway.db.migrate import upgrade
from gateway.ids import uuid7
from gateway.local.services import EmbeddedPostgres, EmbeddedRedis


def _event(chance: random.Random, tenants: int, plain: bool) -> bytes:
    tenant = chance.randrange(tenants)
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "admitted_at": datetime.now(UTC),
        "tenant_id": UUID(int=tenant + 1),
        "key_id": f"key-{tenant}-{chance.randrange(3)}",
        "route": f"model-{chance.randrange(5)}",
        "status": "ok",
        "prompt_tokens": 900,
        "completion_tokens": 300,
        "charged_nano_usd": 210_000,
        "cost_nano_usd": 210_000,
        "price_id": UUID(int=2),
        "streamed": True,
        "backend": f"worker-{chance.randrange(4)}",
        "attempts": 1,
        "first_token_ms": 40,
        "total_ms": 900,
    }
    if not plain:
        values |= {
            "project_id": UUID(int=tenant + 1000),
            "end_user": f"{chance.randrange(10**9):032x}",
            "cached_tokens": 600,
            "cache_write_tokens": 100,
            "reasoning_tokens": 50,
            "images": 1,
            "compute_us": 870_000,
            "cost_price_id": UUID(int=3),
            "markup_bp": 500,
            "queue_ms": 3,
            "tags": ["env=production", "team=search"],
        }
    return msgspec.json.encode(UsageEvent(**values))


def _fill(client: redis.Redis, arguments: argparse.Namespace, chance: random.Random) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(arguments.events):
            fields: dict[Any, Any] = {"event": _event(chance, arguments.tenants, arguments.plain), "revision": 1}
            pipe.xadd(f"{{s{number % arguments.shards:02d}}}:usage", fields)
        pipe.execute()


async def _measure(database_url: str, redis_url: str, client: redis.Redis, arguments: argparse.Namespace) -> None:
    engine = create_engine(database_url)
    drainer = Drainer(engine, redis_url, SystemClock())
    chance = random.Random(7)
    try:
        await drainer.drain_once()  # connects, and makes partitions ahead
        for _ in range(arguments.runs):
            _fill(client, arguments, chance)
            began, cpu = time.perf_counter(), time.process_time()
            moved = await drainer.drain_once()
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            assert moved == arguments.events, moved
            print(f"{moved} events in {wall_s:.2f} s: {moved / wall_s:,.0f}/s, CPU {cpu_s / moved * 1e6:.0f} us each")
    finally:
        await drainer.close()
        await engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=8, help="streams that they are spread over, 64 at most")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="only what an event must say")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        postgres, store = EmbeddedPostgres(Path(folder) / "postgres"), EmbeddedRedis(Path(folder) / "redis")
        try:
            database_url, redis_url = postgres.start(), store.start()
            upgrade(database_url)
            with redis.Redis.from_url(redis_url) as client:
                asyncio.run(_measure(database_url, redis_url, client, arguments))
        finally:
            store.stop()
            postgres.stop()


if __name__ == "__main__":
    main()
