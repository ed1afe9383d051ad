"""Crossed thresholds on their way from Redis to Postgres: each once, whoever moves it and however often."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.admission import keys
from gateway.admission.redis import RedisClient
from gateway.db.engine import transaction
from gateway.db.tables import alerts, tenants
from gateway.ids import uuid7

BATCH = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_log = structlog.get_logger(__name__)


class _Crossing(msgspec.Struct, frozen=True):
    """As the admission scripts write it."""

    limit_id: UUID
    tenant_id: UUID
    subject: str
    target: str
    window: str
    period_start_ms: int
    threshold: int
    spent: int
    amount: int
    at_ms: int


_decoder = msgspec.json.Decoder(_Crossing)


async def move_alerts(redis: RedisClient, engine: AsyncEngine, now: datetime) -> int:
    """Move what waits in all shards; returns how many were new. An alert leaves Redis when Postgres has it.

    Raises RedisUnavailable, RedisError, DatabaseUnavailable.
    """
    there = await asyncio.gather(*(redis.issue("EXISTS", keys.alerts(shard)) for shard in keys.ALL_SHARDS))
    moved = 0
    for shard, waiting in zip(keys.ALL_SHARDS, there, strict=True):
        while waiting:
            entries = await redis.command("XRANGE", keys.alerts(shard), "-", "+", "COUNT", BATCH)
            crossings = [found for _, flat in entries if (found := _read(shard, flat)) is not None]
            if crossings:
                async with transaction(engine) as connection:
                    moved += await _record(connection, crossings, now)
            if entries:
                await redis.command("XDEL", keys.alerts(shard), *(entry_id for entry_id, _ in entries))
            waiting = len(entries) == BATCH
    return moved


def _read(shard: str, flat: list[bytes]) -> _Crossing | None:
    try:
        return _decoder.decode(dict(zip(flat[::2], flat[1::2], strict=False))[b"alert"])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as fault:
        _log.error("alert_dropped", shard=shard, error=repr(fault), entry=repr(flat)[:1000])
        return None


async def _record(connection: AsyncConnection, crossings: list[_Crossing], now: datetime) -> int:
    """Those of tenants without a webhook are kept to be shown, and not sent."""
    ids = {crossing.tenant_id for crossing in crossings}
    found = await connection.execute(select(tenants.c.id, tenants.c.webhook_url).where(tenants.c.id.in_(ids)))
    told = {row.id: row.webhook_url is not None for row in found}
    rows = [
        _row(crossing, now if told[crossing.tenant_id] else None)
        for crossing in crossings
        if crossing.tenant_id in told
    ]
    if not rows:
        return 0
    statement = insert(alerts).values(rows).on_conflict_do_nothing().returning(alerts.c.id)
    return len(list(await connection.scalars(statement)))


def _row(crossing: _Crossing, next_attempt_at: datetime | None) -> dict[str, Any]:
    return {
        "id": uuid7(),
        "tenant_id": crossing.tenant_id,
        "limit_id": crossing.limit_id,
        "period_start": _moment(crossing.period_start_ms),
        "threshold": crossing.threshold,
        "spent_nano_usd": crossing.spent,
        "amount_nano_usd": crossing.amount,
        "subject": crossing.subject,
        "target": crossing.target.replace("\0", "\N{REPLACEMENT CHARACTER}"),
        "window": crossing.window,
        "crossed_at": _moment(crossing.at_ms),
        "next_attempt_at": next_attempt_at,
    }


def _moment(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)
