"""The sums by quarter hour against the rows, by their whole key, as of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.verify.difference import Difference
from gateway.verify.rows import in_months

MOST = 1000
"""Keys told of; there is something very wrong when there are more."""
_KEY = ("bucket", "tenant_id", "project_id", "key_id", "route", "backend", "status")
_SUMS = (
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "images",
    "compute_us",
    "charged_nano_usd",
    "cost_nano_usd",
    "saved_nano_usd",
    "saved_tokens",
)


async def check_rollups(
    connection: AsyncConnection, *, tenant_id: UUID | None, dropped: Sequence[str]
) -> list[Difference]:
    """Months that retention dropped are left out: their sums are all there is."""
    mine = "" if tenant_id is None else " AND tenant_id = :tenant"
    keys = ", ".join(_KEY)
    summed = ", ".join(f"sum({name}) AS {name}" for name in _SUMS[1:])
    pairs = ", ".join(f"coalesce(r.{name}, 0) AS row_{name}, coalesce(s.{name}, 0) AS sum_{name}" for name in _SUMS)
    unequal = " OR ".join(f"coalesce(r.{name}, 0) <> coalesce(s.{name}, 0)" for name in _SUMS)
    query = text(
        f"SELECT {keys}, {pairs} FROM ("
        "  SELECT date_bin('15 minutes', admitted_at, TIMESTAMPTZ 'epoch') AS bucket, tenant_id, project_id, key_id, "
        f"    route, coalesce(backend, '') AS backend, status, count(*) AS requests, {summed} "
        f"  FROM usage_events WHERE NOT {in_months('admitted_at')}{mine} GROUP BY 1, 2, 3, 4, 5, 6, 7) AS r "
        f"FULL JOIN (SELECT * FROM usage_rollup WHERE NOT {in_months('bucket')}{mine}) AS s USING ({keys}) "
        f"WHERE {unequal} ORDER BY {keys} LIMIT {MOST}"
    )
    values = {"dropped": list(dropped)} | ({} if tenant_id is None else {"tenant": tenant_id})
    found = []
    for row in await connection.execute(query, values):
        of = row._mapping
        where = [("bucket", row.bucket.isoformat())]
        where += [(name.removesuffix("_id"), str(of[name])) for name in _KEY[2:]]
        for name in _SUMS:
            expected, sum_ = int(of[f"row_{name}"]), int(of[f"sum_{name}"])
            if expected != sum_:
                found.append(Difference("rollup", row.tenant_id, (*where, ("sum", name)), expected, sum_))
    return found


async def check_doubled(connection: AsyncConnection, *, tenant_id: UUID | None) -> list[Difference]:
    """Requests with more than one row."""
    mine = "" if tenant_id is None else "WHERE tenant_id = :tenant "
    query = text(
        "SELECT request_id, CAST(min(CAST(tenant_id AS text)) AS uuid) AS tenant_id, count(*) AS rows "
        f"FROM usage_events {mine}GROUP BY request_id HAVING count(*) > 1 ORDER BY request_id LIMIT {MOST}"
    )
    return [
        Difference("row", row.tenant_id, (("request", str(row.request_id)),), 1, row.rows, "a request has several rows")
        for row in await connection.execute(query, {} if tenant_id is None else {"tenant": tenant_id})
    ]
