"""The ledger in Postgres: one row for each admitted request, and sums of rows by quarter hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Column, Table, delete, func, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.entries import Entry, clean_text
from gateway.db.partitions import PARTITION_LOCK, partition_ddl
from gateway.db.tables import dead_usage_events, refusal_batches, refusals, usage_events, usage_rollup

QUARTER_S = 900
ROW_FAULTS = (DataError, IntegrityError, OperationalError, UnicodeEncodeError)
"""What a row's own content can cause. Anything else (a table that is missing, say) is no reason to set rows aside."""

ROLLUP_KEY = ("bucket", "tenant_id", "project_id", "key_id", "route", "backend", "status")
Key = tuple[datetime, UUID, UUID, str, str, str, str]


def column_type(column: Column[Any]) -> str:
    """As Postgres names it."""
    return str(column.type.compile(make_url("postgresql+psycopg://").get_dialect()()))


def _from_json(table: Table, columns: Sequence[Column[Any]]) -> str:
    """The begin of an insert whose rows come as JSON, sorted, so that two batches take their locks in one order.

    One parameter, whatever the size of the batch, costs a fraction of what a parameter for each value does.
    """
    names = ", ".join(column.name for column in columns)
    types = ", ".join(f"{column.name} {column_type(column)}" for column in columns)
    return (
        f"INSERT INTO {table.name} AS kept ({names}) "
        f"SELECT {names} FROM json_to_recordset(CAST(:batch AS json)) AS batch ({types}) "
    )


_INSERT_EVENTS = text(
    _from_json(usage_events, [column for column in usage_events.columns if column.name != "recorded_at"])
    + "ON CONFLICT DO NOTHING RETURNING request_id, admitted_at"
)


def cause_of(fault: Exception) -> str:
    """What Postgres said, in few words that it can hold."""
    return clean_text(str(getattr(fault, "orig", None) or fault))[:500]


def quarter_of(moment: datetime) -> datetime:
    """Begin of the quarter hour that holds ``moment``."""
    seconds = int(moment.astimezone(UTC).timestamp())
    return datetime.fromtimestamp(seconds - seconds % QUARTER_S, UTC)


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    compute_us: int = 0
    charged_nano_usd: int = 0
    cost_nano_usd: int = 0
    saved_nano_usd: int = 0
    saved_tokens: int = 0

    def add(self, row: Any, sign: int) -> None:
        self.requests += sign
        self.prompt_tokens += sign * row.prompt_tokens
        self.completion_tokens += sign * row.completion_tokens
        self.cached_tokens += sign * row.cached_tokens
        self.cache_write_tokens += sign * row.cache_write_tokens
        self.reasoning_tokens += sign * row.reasoning_tokens
        self.images += sign * row.images
        self.compute_us += sign * row.compute_us
        self.charged_nano_usd += sign * row.charged_nano_usd
        self.cost_nano_usd += sign * row.cost_nano_usd
        self.saved_nano_usd += sign * row.saved_nano_usd
        self.saved_tokens += sign * row.saved_tokens


ROLLUP_SUMS = tuple(field.name for field in fields(_Sums))
ADD_TO_SUMS = f"ON CONFLICT ({', '.join(ROLLUP_KEY)}) DO UPDATE SET " + ", ".join(
    f"{name} = kept.{name} + excluded.{name}" for name in ROLLUP_SUMS
)
"""End of an insert into ``usage_rollup AS kept``."""
_ADD_TO_ROLLUP = text(
    _from_json(usage_rollup, [usage_rollup.c[name] for name in (*ROLLUP_KEY, *ROLLUP_SUMS)]) + ADD_TO_SUMS
)


class _Differences:
    """What a batch changes in the rollups."""

    def __init__(self) -> None:
        self._sums: dict[Key, _Sums] = {}

    def add(self, row: Any, sign: int) -> None:
        key = (
            quarter_of(row.admitted_at),
            row.tenant_id,
            row.project_id,
            row.key_id,
            row.route,
            row.backend or "",
            row.status,
        )
        self._sums.setdefault(key, _Sums()).add(row, sign)

    def rows(self) -> list[dict[str, Any]]:
        """Sorted by key, so that two batches take the rows' locks in one order. Sums are text: they may be large."""
        return [
            dict(zip(ROLLUP_KEY, key, strict=True)) | dict(zip(ROLLUP_SUMS, map(str, astuple(sums)), strict=True))
            for key, sums in sorted(self._sums.items())
            if any(astuple(sums))
        ]


async def ensure_partition(connection: AsyncConnection, month: datetime) -> None:
    """Make the partition for ``month`` if it is missing. Sessions that race wait for one another."""
    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PARTITION_LOCK})
    await connection.execute(text(partition_ddl(month)))


async def record(connection: AsyncConnection, entries: Sequence[Entry]) -> int:
    """Write entries as rows and add them to the rollups; returns how many rows were new or revised.

    Entries already written change nothing, in whatever order and however often they come: of one request the highest
    revision stays.
    """
    latest: dict[tuple[UUID, datetime], Entry] = {}
    for entry in entries:
        key = (entry.event.request_id, entry.event.admitted_at)
        if key not in latest or latest[key].revision < entry.revision:
            latest[key] = entry
    if not latest:
        return 0
    ordered = [latest[key] for key in sorted(latest)]
    batch = msgspec.json.encode(_rows(ordered)).decode()
    written = await connection.execute(_INSERT_EVENTS, {"batch": batch})
    inserted = {(row.request_id, row.admitted_at) for row in written}
    differences = _Differences()
    known: list[Entry] = []
    for entry in ordered:
        if (entry.event.request_id, entry.event.admitted_at) in inserted:
            differences.add(entry.event, 1)
        else:
            known.append(entry)
    revised = await _revise(connection, known, differences) if known else 0
    if rows := differences.rows():
        await connection.execute(_ADD_TO_ROLLUP, {"batch": msgspec.json.encode(rows).decode()})
    return len(inserted) + revised


async def _revise(connection: AsyncConnection, entries: Sequence[Entry], differences: _Differences) -> int:
    """Replace rows by entries of a higher revision."""
    key = tuple_(usage_events.c.request_id, usage_events.c.admitted_at)
    query = (
        select(usage_events)
        .where(key.in_([(entry.event.request_id, entry.event.admitted_at) for entry in entries]))
        .order_by(usage_events.c.request_id, usage_events.c.admitted_at)
        .with_for_update()
    )
    stored = {(row.request_id, row.admitted_at): row for row in await connection.execute(query)}
    revised = 0
    for entry in entries:
        row = stored[entry.event.request_id, entry.event.admitted_at]
        if row.revision >= entry.revision:
            continue
        differences.add(row, -1)
        differences.add(entry.event, 1)
        (values,) = _rows([entry])
        await connection.execute(
            update(usage_events)
            .where(
                usage_events.c.request_id == entry.event.request_id,
                usage_events.c.admitted_at == entry.event.admitted_at,
            )
            .values(**values, recorded_at=func.now())
        )
        revised += 1
    return revised


def _rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(entry.event) | {"revision": entry.revision} for entry in entries]


async def bury(
    connection: AsyncConnection, shard: str, entry_id: str, raw: bytes, revision: int | None, error: str
) -> None:
    """Keep an entry that cannot become a row, for somebody to look at. Once, however often it is called."""
    await connection.execute(
        insert(dead_usage_events)
        .values(shard=shard, entry_id=entry_id, raw=raw, revision=revision, error=clean_text(error))
        .on_conflict_do_nothing()
    )


async def record_refusals(
    connection: AsyncConnection, batch_id: UUID, counts: Mapping[tuple[datetime, UUID, str, str], int]
) -> bool:
    """Add a batch of counts, by (quarter hour, tenant, key id, reason); False if it was added before."""
    new = await connection.execute(
        insert(refusal_batches).values(id=batch_id).on_conflict_do_nothing().returning(refusal_batches.c.id)
    )
    if new.one_or_none() is None:
        return False
    names = ("bucket", "tenant_id", "key_id", "reason")
    if counts:
        statement = insert(refusals)
        await connection.execute(
            statement.on_conflict_do_update(
                index_elements=[refusals.c[name] for name in names],
                set_={"count": refusals.c["count"] + statement.excluded["count"]},
            ),
            [dict(zip(names, key, strict=True)) | {"count": count} for key, count in sorted(counts.items())],
        )
    return True


async def forget_refusal_batches(connection: AsyncConnection) -> None:
    """Drop the marks of batches that Redis has forgotten long since."""
    await connection.execute(
        delete(refusal_batches).where(refusal_batches.c.recorded_at < func.now() - text("interval '7 days'"))
    )
