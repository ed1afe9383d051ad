"""Sums over the ledger's rows up to a moment, without some requests; months that retention dropped from the rollups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.admission.plan import Counter
from gateway.billing.retention import DROPPED_MONTH
from gateway.db.tables import audit_log
from gateway.tenants.principal import Subject

_FILTERS: dict[Subject, str] = {
    "tenant": "",
    "project": " AND project_id = CAST(:target AS uuid)",
    "key": " AND key_id = :target",
    "model": " AND route = :target",
    "end_user": " AND end_user = :target",
}
_ROWS = (
    "FROM usage_events WHERE tenant_id = :tenant AND admitted_at >= :start AND admitted_at < :end "
    "AND NOT request_id = ANY (CAST(:excluding AS uuid[]))"
)
_MILLISECOND = timedelta(milliseconds=1)


async def dropped_months(connection: AsyncConnection) -> list[str]:
    """Months whose rows retention has dropped, as ``2026-01``; of them only the sums by quarter hour are whole."""
    found = await connection.scalars(select(audit_log.c.target).where(audit_log.c.kind == DROPPED_MONTH).distinct())
    return sorted(found)


def in_months(column: str) -> str:
    """SQL that tells whether a time lies in one of the months ``:dropped``."""
    return f"to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM') = ANY (CAST(:dropped AS text[]))"


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger of one tenant, as of one transaction, for requests admitted until ``at``."""

    connection: AsyncConnection
    tenant_id: UUID
    at: datetime
    excluding: Collection[UUID]
    dropped: Collection[str]

    async def charged(self, counter: Counter, start: datetime, end: datetime) -> int | None:
        """Nano-USD; None: it cannot be told, since rows were dropped and end users are in no rollup."""
        which = _FILTERS[counter.subject]
        gone = [month for month in self.dropped if f"{start:%Y-%m}" <= month <= f"{end:%Y-%m}"]
        if gone and counter.subject == "end_user":
            return None
        query = f"SELECT coalesce(sum(charged_nano_usd), 0) {_ROWS}{which}"
        if gone:
            query = (
                f"SELECT ({query} AND NOT {in_months('admitted_at')}) + (SELECT coalesce(sum(charged_nano_usd), 0) "
                f"FROM usage_rollup WHERE tenant_id = :tenant AND bucket >= :start AND bucket < :end{which} "
                f"AND {in_months('bucket')})"
            )
        values = self._values(counter, start, end) | ({"dropped": gone} if gone else {})
        return int(await self.connection.scalar(text(query), values) or 0)

    async def used(self, counter: Counter, since: datetime) -> int:
        """Requests or tokens, as the counter counts them."""
        what = (
            "coalesce(sum(prompt_tokens + completion_tokens), 0)"
            if counter.metric == "tokens"
            else "count(*) FILTER (WHERE NOT (status = 'failed' AND attempts = 0))"
        )
        query = text(f"SELECT {what} {_ROWS}{_FILTERS[counter.subject]}")
        return int(await self.connection.scalar(query, self._values(counter, since, self.at + _MILLISECOND)) or 0)

    def _values(self, counter: Counter, start: datetime, end: datetime) -> dict[str, object]:
        values: dict[str, object] = {
            "tenant": self.tenant_id,
            "start": start,
            "end": min(end, self.at + _MILLISECOND),
            "excluding": list(self.excluding),
        }
        return values | ({"target": counter.target} if counter.subject != "tenant" else {})
