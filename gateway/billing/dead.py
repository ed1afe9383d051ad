"""Usage events that could not become rows: kept as they were, to be looked at, tried again, or given up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.billing.entries import BadEntry, Entry, clean_text, read_entry
from gateway.billing.ledger import ROW_FAULTS, cause_of, ensure_partition, record
from gateway.billing.retention import was_dropped
from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.partitions import month_of
from gateway.db.tables import dead_usage_events
from gateway.tenants.audit import Actor, audit
from gateway.tenants.records import StateConflict, Unknown
from gateway.tenants.specs import check_page

RETRY_TIMEOUT_S = 10.0
MAX_AUDITED = 10_000
"""Characters of a discarded event that the audit log keeps."""


class UnknownDeadEvent(Unknown):
    def __init__(self, dead_id: int) -> None:
        super().__init__(f"there is no dead event {dead_id}; `penstock dead list` shows those there are")


class StillDead(StateConflict):
    """A dead event that cannot become a row now either; the message says why."""


@dataclass(frozen=True, slots=True)
class DeadEvent:
    id: int
    shard: str
    entry_id: str
    """Of the entry in the shard's stream."""
    raw: bytes
    """The event as it stood there, byte for byte."""
    revision: int | None
    error: str
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class Retried:
    request_id: UUID
    new: bool
    """False: the ledger had this request already, in this revision or a later one."""


class DeadEvents:
    """Raises DatabaseUnavailable when Postgres is away."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def list(self, *, after: int | None = None, limit: int = 100) -> list[DeadEvent]:
        """Oldest first; ``after``: those behind that one. Raises ConfigurationError."""
        query = select(dead_usage_events).order_by(dead_usage_events.c.id).limit(check_page(limit))
        if after is not None:
            query = query.where(dead_usage_events.c.id > after)
        async with transaction(self._engine) as connection:
            return [DeadEvent(**row._mapping) for row in await connection.execute(query)]

    async def count(self) -> int:
        async with transaction(self._engine) as connection:
            return int(await connection.scalar(select(func.count()).select_from(dead_usage_events)) or 0)

    async def get(self, dead_id: int) -> DeadEvent:
        """Raises UnknownDeadEvent."""
        async with transaction(self._engine) as connection:
            return await _find(connection, dead_id)

    async def retry(self, actor: Actor, dead_id: int) -> Retried:
        """Read it and write its row as the drainer does; then it is dead no more.

        Raises UnknownDeadEvent, StillDead.
        """
        actor.check_may_change()
        try:
            async with transaction(self._engine, timeout_s=RETRY_TIMEOUT_S) as connection:
                dead = await _find(connection, dead_id, lock=True)
                entry = self._entry(dead)
                month = month_of(entry.event.admitted_at)
                if await was_dropped(connection, month):
                    raise StillDead(
                        f"the rows of {month:%Y-%m} were dropped by retention, so nobody can tell whether this request "
                        f"was among them; discard it: penstock dead discard {dead_id}"
                    )
                await ensure_partition(connection, month)
                new = await record(connection, [entry]) > 0
                await connection.execute(delete(dead_usage_events).where(dead_usage_events.c.id == dead_id))
                request_id = entry.event.request_id
                after = {"request_id": request_id, "charged_nano_usd": entry.event.charged_nano_usd, "new": new}
                await audit(
                    connection,
                    actor,
                    "retry",
                    "dead_event",
                    str(dead_id),
                    tenant_id=entry.event.tenant_id,
                    before=_told(dead),
                    after=after,
                )
        except ROW_FAULTS as fault:
            raise StillDead(f"Postgres refuses it: {cause_of(fault)}") from fault
        return Retried(request_id, new)

    async def discard(self, actor: Actor, dead_id: int) -> None:
        """Give it up: what it says was charged is in no report. The audit log keeps it. Raises UnknownDeadEvent."""
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            dead = await _find(connection, dead_id, lock=True)
            await connection.execute(delete(dead_usage_events).where(dead_usage_events.c.id == dead_id))
            raw = clean_text(dead.raw.decode("utf-8", "replace"))[:MAX_AUDITED]
            await audit(connection, actor, "discard", "dead_event", str(dead_id), before=_told(dead) | {"raw": raw})

    def _entry(self, dead: DeadEvent) -> Entry:
        fields = {b"event": dead.raw, b"revision": b"1" if dead.revision is None else str(dead.revision).encode()}
        try:
            return read_entry(dead.entry_id, fields, self._clock.now())
        except BadEntry as fault:
            raise StillDead(f"it cannot be read: {fault}") from fault


async def _find(connection: AsyncConnection, dead_id: int, *, lock: bool = False) -> DeadEvent:
    if not 0 < dead_id < 2**63:
        raise UnknownDeadEvent(dead_id)
    query = select(dead_usage_events).where(dead_usage_events.c.id == dead_id)
    row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    if row is None:
        raise UnknownDeadEvent(dead_id)
    return DeadEvent(**row._mapping)


def _told(dead: DeadEvent) -> dict[str, Any]:
    return {"shard": dead.shard, "entry_id": dead.entry_id, "revision": dead.revision, "error": dead.error}
