"""Counts of refused requests on their way from Redis to Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from gateway.admission import keys
from gateway.admission.redis import RedisClient
from gateway.billing.drainer import refusal_batch, refusal_key
from gateway.verify.difference import Difference


async def check_refusals(
    redis: RedisClient, shards: Sequence[str], tenant_id: UUID | None
) -> tuple[int, list[Difference]]:
    """How many refusals wait in Redis, and counts that can never become a row. Raises RedisUnavailable."""
    waiting, found = 0, []
    for shard in shards:
        for key in (keys.refusals(shard), refusal_batch(shard)):
            flat = await redis.command("HGETALL", key)
            for name, value in zip(flat[::2], flat[1::2], strict=True):
                if name == b"batch":
                    continue
                field = name.decode("utf-8", "backslashreplace")
                try:
                    _, owner, _, _ = refusal_key(field)
                    count = int(value)
                except ValueError:
                    if tenant_id is None:
                        where = (("shard", shard), ("field", field[:500]))
                        found.append(Difference("refusals", None, where, 0, 1, "a count of refusals cannot be read"))
                    continue
                if tenant_id not in (None, owner):
                    continue
                waiting += count
                if count < 1:
                    where = (("shard", shard), ("field", field))
                    found.append(Difference("refusals", owner, where, 1, count, "a count of refusals is below 1"))
    return waiting, found
