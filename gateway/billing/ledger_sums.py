"""Sums over the ledger from which admission builds its counters: what some of a tenant's requests came to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.ledger import QUARTER_S, quarter_of
from gateway.db.engine import transaction
from gateway.tenants.principal import Subject

TIMEOUT_S = 30.0
_LATEST = datetime(2200, 1, 1, tzinfo=UTC)
_FILTERS: dict[Subject, str] = {
    "tenant": "",
    "project": " AND project_id = CAST(:target AS uuid)",
    "key": " AND key_id = :target",
    "model": " AND route = :target",
    "end_user": " AND end_user = :target",
}
_SUM = "SELECT coalesce(sum(charged_nano_usd), 0) FROM"
_ROWS = "usage_events WHERE tenant_id = :tenant AND admitted_at >= :start AND admitted_at < :end"
_EXCLUDED = "request_id = ANY (CAST(:excluding AS uuid[]))"


class PostgresSums:
    """Reads the rows and rollups in one statement, and so as of one moment. Raises DatabaseUnavailable."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def charged(
        self,
        tenant_id: UUID,
        start: datetime,
        end: datetime,
        *,
        subject: Subject = "tenant",
        target: str = "",
        excluding: Collection[UUID] = (),
    ) -> int:
        """Nano-USD charged for requests with ``start`` <= admitted_at < ``end`` of whom ``subject`` and ``target``
        name, but those in ``excluding``. End users are summed from rows, and so as far back as rows are kept."""
        which = _FILTERS[subject]
        first, last = _whole_quarters(start, end)
        if subject == "end_user":
            query = f"{_SUM} {_ROWS}{which} AND NOT {_EXCLUDED}"
        else:
            # Whole quarter hours from the rollups; what is ragged at either end, or to be left out, from the rows.
            query = (
                f"SELECT ({_SUM} usage_rollup WHERE tenant_id = :tenant AND bucket >= :first AND bucket < :last{which})"
                f" + ({_SUM} {_ROWS}{which} AND (admitted_at < :first OR admitted_at >= :last))"
                f" - ({_SUM} {_ROWS}{which} AND {_EXCLUDED})"
            )
        values = {
            "tenant": tenant_id,
            "start": start,
            "end": min(end, _LATEST),
            "first": first,
            "last": last,
            "target": target,
            "excluding": list(excluding),
        }
        async with transaction(self._engine, timeout_s=TIMEOUT_S) as connection:
            return int(await connection.scalar(text(query), values) or 0)

    async def used(
        self,
        tenant_id: UUID,
        since: datetime,
        *,
        width_s: int,
        subject: Subject = "tenant",
        target: str = "",
        excluding: Collection[UUID] = (),
    ) -> Sequence[tuple[int, int, int]]:
        """What was admitted from ``since`` on, by bucket: its number (Unix seconds over ``width_s``), requests but
        those that failed before any backend was tried, tokens in and out."""
        query = text(
            "SELECT CAST(floor(extract(epoch FROM admitted_at) / :width) AS bigint) AS bucket, "
            "count(*) FILTER (WHERE NOT (status = 'failed' AND attempts = 0)) AS requests, "
            "coalesce(sum(prompt_tokens + completion_tokens), 0) AS tokens "
            f"FROM {_ROWS}{_FILTERS[subject]} AND NOT {_EXCLUDED} GROUP BY 1"
        )
        values = {
            "tenant": tenant_id,
            "start": since,
            "end": _LATEST,
            "width": width_s,
            "target": target,
            "excluding": list(excluding),
        }
        async with transaction(self._engine, timeout_s=TIMEOUT_S) as connection:
            rows = await connection.execute(query, values)
            return [(int(row.bucket), int(row.requests), int(row.tokens)) for row in rows]


def _whole_quarters(start: datetime, end: datetime) -> tuple[datetime, datetime]:
    """Begin and end of the quarter hours that lie wholly in the range; begin = end = ``end`` if there are none."""
    end = min(end, _LATEST)
    first, last = quarter_of(start), quarter_of(end)
    if first != start:
        first += timedelta(seconds=QUARTER_S)
    return (first, last) if first < last else (end, end)
