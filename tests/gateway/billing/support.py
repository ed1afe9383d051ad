"""Usage events, the stream they come by, and the sums that must agree."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.usage import UsageEvent
from gateway.ids import uuid7

NOON = datetime(2024, 6, 3, 12, 0, tzinfo=UTC)
"""In the past, whenever the tests run; no migration has made its partition."""
TENANT = UUID(int=1)
SHARD = "{s07}"

ROW_SUMS = """
SELECT tenant_id, key_id, route, status, count(*) AS requests, sum(prompt_tokens)::bigint AS prompt_tokens,
       sum(completion_tokens)::bigint AS completion_tokens, sum(cached_tokens)::bigint AS cached_tokens,
       sum(charged_nano_usd)::bigint AS charged_nano_usd, sum(cost_nano_usd)::bigint AS cost_nano_usd,
       date_bin('15 minutes', admitted_at, 'epoch') AS bucket
FROM usage_events GROUP BY bucket, tenant_id, key_id, route, status ORDER BY bucket, tenant_id, key_id, route, status
"""
ROLLUPS = """
SELECT tenant_id, key_id, route, status, requests, prompt_tokens, completion_tokens, cached_tokens,
       charged_nano_usd::bigint, cost_nano_usd::bigint, bucket
FROM usage_rollup WHERE requests <> 0 OR charged_nano_usd <> 0 OR prompt_tokens <> 0
ORDER BY bucket, tenant_id, key_id, route, status
"""


def usage_event(**changes: Any) -> UsageEvent:
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "admitted_at": NOON,
        "tenant_id": TENANT,
        "key_id": "key",
        "route": "m",
        "status": "ok",
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "charged_nano_usd": 2100,
        "cost_nano_usd": 2100,
        "price_id": UUID(int=2),
    }
    return UsageEvent(**(values | changes))


class Stream:
    """A shard's usage stream, filled as settlement does."""

    def __init__(self, client: redis.Redis, shard: str = SHARD) -> None:
        self.client = client
        self.shard = shard

    def add(self, event: UsageEvent | bytes, revision: int | str = 1) -> str:
        raw = event if isinstance(event, bytes) else msgspec.json.encode(event)
        return str(self.client.xadd(f"{self.shard}:usage", {"event": raw, "revision": revision}))

    def add_all(self, events: Iterable[UsageEvent]) -> None:
        with self.client.pipeline() as pipe:
            for event in events:
                pipe.xadd(f"{self.shard}:usage", {"event": msgspec.json.encode(event), "revision": 1})
            pipe.execute()

    def __len__(self) -> int:
        return int(self.client.xlen(f"{self.shard}:usage"))


async def fetch(engine: AsyncEngine, query: str) -> list[dict[str, Any]]:
    async with engine.connect() as connection:
        return [dict(row) for row in (await connection.execute(text(query))).mappings()]


async def assert_consistent(engine: AsyncEngine) -> None:
    """The rollups are the sums of the rows."""
    assert await fetch(engine, ROLLUPS) == await fetch(engine, ROW_SUMS)
