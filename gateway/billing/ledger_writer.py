"""Brings what stood in the shards' streams into the ledger: by one statement, or with care where that will not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.bulk import REVISIONS, NotPlain, record_plain
from gateway.billing.entries import BadEntry, Entry, raw_of, read_entry, revision_of
from gateway.billing.ledger import ROW_FAULTS, bury, cause_of, ensure_partition, record
from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.partitions import month_of

WRITE_TIMEOUT_S = 10.0
CAREFUL_BATCH = 500

_log = structlog.get_logger(__name__)
RawEntry = tuple[bytes, list[bytes]]
"""An entry's id in its stream, and its fields and values in turn."""
_PLAIN_FIELDS = ([b"event", b"revision"], [b"event", b"revision", b"again"])


class LedgerWriter:
    """All methods raise DatabaseUnavailable; what was written before stays written."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._months: set[datetime] = set()

    async def write(self, batch: Mapping[str, Sequence[RawEntry]]) -> dict[str, Exception]:
        """Write entries by shard: each becomes a row or is set aside. Returns the shards of which not all did, and why.

        What is odd in one shard is looked at with care there, and costs the others no more than one more attempt.
        """
        if await self._write_plain(batch):
            return {}
        faults: dict[str, Exception] = {}
        for shard, entries in batch.items():
            try:
                if len(batch) == 1 or not await self._write_plain({shard: entries}):
                    for start in range(0, len(entries), CAREFUL_BATCH):
                        await self._write_carefully(shard, entries[start : start + CAREFUL_BATCH])
            except SQLAlchemyError as fault:
                faults[shard] = fault
        return faults

    async def _write_plain(self, batch: Mapping[str, Sequence[RawEntry]]) -> bool:
        """False: nothing was written."""
        events = [
            (flat[1], flat[3])
            for entries in batch.values()
            for _, flat in entries
            if flat[::2] in _PLAIN_FIELDS and flat[3] in REVISIONS
        ]
        number = sum(map(len, batch.values()))
        if len(events) < number:
            return False
        try:
            async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
                await record_plain(connection, events, self._clock.now())
        except (NotPlain, SQLAlchemyError) as fault:
            state = getattr(getattr(fault, "orig", None), "sqlstate", None)
            _log.info("batch_needs_care", shards=len(batch), entries=number, reason=type(fault).__name__, state=state)
            return False
        return True

    async def _write_carefully(self, shard: str, batch: Sequence[RawEntry]) -> None:
        entries: list[Entry] = []
        for entry_id, flat in batch:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            try:
                entries.append(read_entry(entry_id.decode(), fields, self._clock.now()))
            except BadEntry as fault:
                await self._bury(shard, entry_id.decode(), raw_of(fields), revision_of(fields), str(fault))
        if entries:
            await self._record_or_bury(shard, entries)

    async def _record_or_bury(self, shard: str, entries: Sequence[Entry]) -> None:
        try:
            await self._record(entries)
        except ROW_FAULTS as fault:
            self._months.clear()
            if len(entries) == 1:
                try:
                    await self._record(entries)
                except ROW_FAULTS as again:
                    (entry,) = entries
                    await self._bury(shard, entry.id, entry.raw, entry.revision, cause_of(again))
                return
            # Some row of it will not go in. Which one is found by halves.
            _log.warning("batch_refused", shard=shard, entries=len(entries), error=cause_of(fault))
            for half in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
                await self._record_or_bury(shard, half)

    async def _record(self, entries: Sequence[Entry]) -> None:
        for month in sorted({month_of(entry.event.admitted_at) for entry in entries} - self._months):
            await self.ensure_partition(month)
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await record(connection, entries)

    async def _bury(self, shard: str, entry_id: str, raw: bytes, revision: int | None, error: str) -> None:
        _log.error("usage_event_set_aside", shard=shard, entry_id=entry_id, error=error, table="dead_usage_events")
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await bury(connection, shard, entry_id, raw, revision, error)

    async def ensure_partition(self, month: datetime) -> None:
        async with transaction(self._engine, timeout_s=WRITE_TIMEOUT_S) as connection:
            await ensure_partition(connection, month)
        self._months.add(month)
