"""Counting a budget anew: ledger, plus events on their way to it, plus what running requests have reserved."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol
from uuid import UUID

import msgspec

from gateway.admission import keys
from gateway.admission.periods import Period, to_ms
from gateway.admission.redis import PipelinedRedis, RedisUnavailable, load_script
from gateway.admission.ticket import MAX_AMOUNT
from gateway.billing.usage import UsageEvent

REBUILD = load_script("rebuild")
_PAGE = 1000
_ATTEMPTS = 10
_decoder = msgspec.json.Decoder(UsageEvent)


class SpentInLedger(Protocol):
    """Reads the ledger: nano-USD charged to a tenant for requests with ``start`` <= admitted_at < ``end``, but those
    in ``excluding``."""

    async def __call__(
        self, tenant_id: UUID, start: datetime, end: datetime, excluding: Collection[UUID], /
    ) -> int: ...


async def rebuild_budget(
    redis: PipelinedRedis,
    tenant_id: UUID,
    period: Period,
    spent: SpentInLedger,
    *,
    tenant_life_ms: int,
) -> None:
    """Begin ``period`` for the tenant in Redis. Raises RedisUnavailable, and what ``spent`` raises.

    An event may move from the stream to the ledger at any moment, so the ledger is asked without the requests found in
    the stream; and Redis takes the sum only if the tenant had no settlement since before the stream was read.
    """
    spelled = keys.of_tenant(tenant_id)
    for _ in range(_ATTEMPTS):
        settlements = await redis.command("HGET", spelled.tenant, "settlements") or b"0"
        undrained = await _undrained(redis, spelled.shard, tenant_id, period)
        total = await spent(tenant_id, period.start, period.end, frozenset(undrained))
        # A sum beyond what Redis counts exactly is beyond every budget, too.
        total = min(total + sum(undrained.values()), MAX_AMOUNT)
        reply = await redis.run(
            REBUILD,
            (spelled.tenant, spelled.live),
            (
                redis.time_offset_ms,
                keys.prefix(spelled.shard),
                settlements,
                period.kind,
                to_ms(period.start),
                to_ms(period.end),
                total,
                tenant_life_ms,
            ),
        )
        if reply[0] != b"CHANGED":
            return
    raise RedisUnavailable("the budget could not be counted while requests kept ending")


async def _undrained(redis: PipelinedRedis, shard: str, tenant_id: UUID, period: Period) -> dict[UUID, int]:
    """What the tenant's events of the period in the stream charge, by request; a later revision replaces the first."""
    charged: dict[UUID, int] = {}
    after = "-"
    while True:
        page = await redis.command("XRANGE", keys.usage(shard), after, "+", "COUNT", _PAGE)
        for entry_id, fields in page:
            after = "(" + entry_id.decode()
            event = _decoder.decode(fields[fields.index(b"event") + 1])
            if event.tenant_id == tenant_id and period.holds(event.admitted_at):
                charged[event.request_id] = event.charged_nano_usd
        if len(page) < _PAGE:
            return charged
