"""Old months of ledger rows are dropped whole; the sums by quarter hour stay, and so do reports made of them.

A month that got a row within the last day is let be, whatever its age: what comes late is not dropped at once.
"""

from __future__ import annotations

from datetime import datetime

import structlog
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db.engine import transaction
from gateway.db.partitions import (
    PARTITION_LOCK,
    RETENTION_LOCK,
    month_in_name,
    month_of,
    months_before,
    partition_name,
)
from gateway.db.tables import audit_log
from gateway.tenants.audit import Actor, audit

QUIET = "1 day"
SCAN_TIMEOUT_S = 600.0
"""Reading a month to see whether it still gets rows takes a while; nobody but writers into that month waits for it."""
LOCK_TIMEOUT = "2s"
"""Dropping waits no longer for readers of the ledger, because everybody else would wait behind it."""
_ACTOR = Actor("retention")
DROPPED_MONTH = "ledger_month"
"""What the audit log calls a month whose rows were dropped."""
_LOCK_NOT_AVAILABLE = "55P03"
_DEADLOCK = "40P01"
_log = structlog.get_logger(__name__)


class _InUse(Exception):
    """Somebody reads or writes the month at this moment."""


async def drop_old_months(engine: AsyncEngine, now: datetime, keep_months: int) -> list[datetime]:
    """Drop the months that are more than ``keep_months`` whole months before the running one; returns which.

    Any replica may call it; one works at a time. A month in use is left for the next call. Raises DatabaseUnavailable.
    """
    first_kept = months_before(month_of(now), keep_months)
    async with transaction(engine) as connection:
        old = [month for month in await _months(connection) if month < first_kept]
    dropped = []
    for month in old:
        try:
            if await _drop(engine, month):
                dropped.append(month)
        except _InUse as fault:
            _log.warning("ledger_month_in_use", month=f"{month:%Y-%m}", error=str(fault))
    return dropped


async def was_dropped(connection: AsyncConnection, month: datetime) -> bool:
    """Whether retention has dropped rows of this month."""
    entry = select(audit_log.c.id).where(audit_log.c.kind == DROPPED_MONTH, audit_log.c.target == f"{month:%Y-%m}")
    return await connection.scalar(entry.limit(1)) is not None


async def _months(connection: AsyncConnection) -> list[datetime]:
    """Of the partitions there are, oldest first."""
    names = await connection.scalars(
        text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_events'::regclass")
    )
    return sorted(month for name in names if (month := month_in_name(name)) is not None)


async def _drop(engine: AsyncEngine, month: datetime) -> bool:
    name = partition_name(month)
    async with transaction(engine, timeout_s=SCAN_TIMEOUT_S) as connection:
        if not await connection.scalar(select(func.pg_try_advisory_xact_lock(RETENTION_LOCK))):
            return False
        if month not in await _months(connection):
            return False  # another replica was quicker
        try:
            await connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
            # From here on it gets no rows, so that none is dropped unseen; its readers are not disturbed yet.
            await connection.execute(text(f"LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE"))
            found = await connection.execute(
                text(f"SELECT count(*) AS rows, max(recorded_at) > now() - interval '{QUIET}' AS fresh FROM {name}")
            )
            rows, fresh = found.one()
            if fresh:
                _log.info("ledger_month_still_gets_rows", month=f"{month:%Y-%m}")
                return False
            await connection.execute(select(func.pg_advisory_xact_lock(PARTITION_LOCK)))
            await connection.execute(text(f"DROP TABLE {name}"))
        except DBAPIError as fault:
            if getattr(fault.orig, "sqlstate", None) in (_LOCK_NOT_AVAILABLE, _DEADLOCK):
                raise _InUse(str(fault.orig)) from fault
            raise
        await audit(connection, _ACTOR, "drop", DROPPED_MONTH, f"{month:%Y-%m}", before={"rows": rows})
    _log.info("ledger_month_dropped", month=f"{month:%Y-%m}", rows=rows)
    return True
