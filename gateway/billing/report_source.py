"""Where a report's sums come from: rollups for whole quarter hours, rows for the ragged ends of its ranges.

Both in one statement and so one snapshot: the parts of a range always add up to the whole, and to the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Select, Table, Text, and_, case, cast, func, literal, or_, select, union_all
from sqlalchemy.dialects.postgresql import array

from gateway.billing.ledger import QUARTER_S, quarter_of
from gateway.billing.local_time import Range
from gateway.billing.usage import Status
from gateway.db.tables import usage_events, usage_rollup

SUMS = (
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
"""Columns that rows and rollups share and that are summed, beside the number of requests."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Values of which one must fit; None: any."""

    tenants: Collection[UUID] | None = None
    projects: Collection[UUID] | None = None
    keys: Collection[str] | None = None
    models: Collection[str] | None = None
    backends: Collection[str] | None = None
    statuses: Collection[Status] | None = None
    end_users: Collection[str] | None = None
    tags: Collection[str] | None = None


def rollup_or_rows(ranges: Sequence[Range], filters: Filters) -> Any:
    """``moment``, the dimensions that rollups know, ``requests`` and SUMS."""
    whole, ragged = split(ranges)
    parts = []
    if whole:
        parts.append(_rollup(whole, filters))
    if ragged or not whole:
        parts.append(_core(rows(ragged, filters)))
    return parts[0] if len(parts) == 1 else union_all(*parts)


def split(ranges: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    """The whole quarter hours in the ranges, and what is left at their ends."""
    whole, ragged = [], []
    for begin, end in ranges:
        first = quarter_of(begin)
        if first != begin:
            first += timedelta(seconds=QUARTER_S)
        last = quarter_of(end)
        if first >= last:
            ragged.append((begin, end))
            continue
        whole.append((first, last))
        ragged += [(a, b) for a, b in ((begin, first), (last, end)) if a < b]
    return whole, ragged


def _core(query: Select[Any]) -> Select[Any]:
    """Without the columns that rollups have not."""
    return query.with_only_columns(*(column for column in query.selected_columns if column.key != "end_user"))


def _rollup(ranges: Sequence[Range], filters: Filters) -> Select[Any]:
    columns = usage_rollup.c
    return select(
        columns.bucket.label("moment"),
        columns.tenant_id,
        columns.project_id,
        columns.key_id,
        columns.route,
        columns.backend,
        columns.status,
        columns.requests,
        *(columns[name] for name in SUMS),
    ).where(_within(columns.bucket, ranges), *_core_filters(usage_rollup, filters))


def rows(ranges: Sequence[Range], filters: Filters, *, each_tag: bool = False) -> Select[Any]:
    """As ``rollup_or_rows``, and ``end_user`` ('' for none).

    ``each_tag``: and ``tag``, for which a row comes once for each tag that it has and that is asked for; with none it
    comes once, as ''.
    """
    columns = usage_events.c
    chosen: list[Any] = [
        columns.admitted_at.label("moment"),
        columns.tenant_id,
        columns.project_id,
        columns.key_id,
        columns.route,
        func.coalesce(columns.backend, "").label("backend"),
        columns.status,
        literal(1).label("requests"),
        *(columns[name] for name in SUMS),
        func.coalesce(columns.end_user, "").label("end_user"),
    ]
    conditions = [_within(columns.admitted_at, ranges), *_core_filters(usage_events, filters)]
    if filters.end_users is not None:
        conditions.append(columns.end_user.in_(filters.end_users))
    if filters.tags is not None:
        conditions.append(columns.tags.bool_op("&&")(cast(array(list(filters.tags)), columns.tags.type)))
    if not each_tag:
        return select(*chosen).where(*conditions)
    none = cast(array([""]), columns.tags.type)
    tags = case((func.cardinality(columns.tags) == 0, none), else_=columns.tags)
    tag = func.unnest(tags, type_=Text()).column_valued("tag", joins_implicitly=True)
    if filters.tags is not None:
        conditions.append(tag.in_(filters.tags))
    return select(*chosen, tag.label("tag")).where(*conditions)


def _within(moment: Any, ranges: Sequence[Range]) -> Any:
    if not ranges:
        return literal(False)
    return or_(*(and_(moment >= begin, moment < end) for begin, end in ranges))


def _core_filters(table: Table, filters: Filters) -> list[Any]:
    columns = table.c
    backend = columns.backend if table is usage_rollup else func.coalesce(columns.backend, "")
    fitting = (
        (columns.tenant_id, filters.tenants),
        (columns.project_id, filters.projects),
        (columns.key_id, filters.keys),
        (columns.route, filters.models),
        (backend, filters.backends),
        (columns.status, filters.statuses),
    )
    return [column.in_(values) for column, values in fitting if values is not None]
