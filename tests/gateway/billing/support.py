"""Usage events, the stream they come by, and the sums that must agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import redis
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.drainer import Drainer
from gateway.billing.usage import UsageEvent
from gateway.clock import SystemClock
from gateway.ids import uuid7

NOON = datetime(2024, 6, 3, 12, 0, tzinfo=UTC)
"""In the past, whenever the tests run; no migration has made its partition."""
TENANT = UUID(int=1)
SHARD = "{s07}"

_KEY = "bucket, tenant_id, project_id, key_id, route, backend, status"
_SUMS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "images",
    "compute_us",
    "charged_nano_usd",
    "cost_nano_usd",
)
ROW_SUMS = f"""
SELECT {_KEY}, count(*) AS requests, {", ".join(f"sum({name})::numeric AS {name}" for name in _SUMS)}
FROM (SELECT date_bin('15 minutes', admitted_at, 'epoch') AS bucket, tenant_id, project_id, key_id, route,
             coalesce(backend, '') AS backend, status, {", ".join(_SUMS)} FROM usage_events) AS events
GROUP BY {_KEY} ORDER BY {_KEY}
"""
ROLLUPS = f"""
SELECT {_KEY}, requests, {", ".join(f"{name}::numeric" for name in _SUMS)}
FROM usage_rollup WHERE requests <> 0 OR {" OR ".join(f"{name} <> 0" for name in _SUMS)} ORDER BY {_KEY}
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


def full_event(**changes: Any) -> UsageEvent:
    """One that says all that an event can say."""
    values: dict[str, Any] = {
        "project_id": UUID(int=3),
        "end_user": "0123456789abcdef0123456789abcdef",
        "cached_tokens": 4,
        "cache_write_tokens": 2,
        "reasoning_tokens": 1,
        "images": 5,
        "compute_us": 123_456,
        "usage_source": "counted",
        "cost_nano_usd": 7,
        "cost_price_id": UUID(int=4),
        "markup_bp": -250,
        "over_bound": True,
        "streamed": True,
        "backend": "w-1",
        "attempts": 3,
        "client_request_id": "c",
        "first_token_ms": 0,
        "total_ms": 2**40,
        "queue_ms": 17,
        "tags": ["env=prod", 'team=\u00fcnï, {"x"}'],
    }
    return usage_event(**(values | changes))


GOOD: dict[str, Any] = json.loads(msgspec.json.encode(full_event()))
_WILD = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(10**40), 10**40),
        st.floats(),
        st.text(),
        st.text(st.characters(categories=["Cs", "Cc"])),
        st.datetimes().map(datetime.isoformat),
        st.just("x" * 100_000),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_TAGS = st.lists(st.text(max_size=300) | st.text(st.characters(categories=["Cs", "Cc"])), max_size=50)


def wild_changes() -> st.SearchStrategy[dict[str, Any]]:
    """What may stand in an event's JSON in place of what is in GOOD."""
    fields = st.sampled_from([*GOOD, "unknown"])
    return st.dictionaries(fields, _WILD, max_size=4) | st.fixed_dictionaries({"tags": _TAGS})


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


async def rows_of(engine: AsyncEngine) -> list[dict[str, Any]]:
    return await fetch(engine, "SELECT * FROM usage_events ORDER BY request_id")


async def eventually(engine: AsyncEngine, count: int) -> None:
    async with asyncio.timeout(20):
        while len(await rows_of(engine)) < count:  # noqa: ASYNC110 - another connection tells no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(engine: AsyncEngine, redis_url: str) -> AsyncIterator[Drainer]:
    drainer = Drainer(engine, redis_url, SystemClock(), interval_s=0.05)
    await drainer.start()
    try:
        yield drainer
    finally:
        await drainer.close()
