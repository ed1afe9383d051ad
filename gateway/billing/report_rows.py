"""Lines of a report, as they are told: to a tenant, and with what only administrators see."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import date, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.billing.report_query import STATUSES, Dimension
from gateway.billing.usage import Status, usd_text


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the requests of one group. Dimensions that are not grouped by are left out; amounts are exact."""

    project: str | UnsetType = UNSET
    """Name; the id, should the project be gone."""
    project_id: str | UnsetType = UNSET
    key_id: str | UnsetType = UNSET
    """Public id."""
    key_name: str | UnsetType | None = UNSET
    model: str | UnsetType = UNSET
    end_user: str | UnsetType | None = UNSET
    """Keyed hash; null: requests that name none."""
    tag: str | UnsetType | None = UNSET
    """A request counts for each of its tags; null: requests without."""
    status: Status | UnsetType = UNSET
    hour: datetime | UnsetType = UNSET
    """Begin, with the zone's offset then."""
    day: date | UnsetType = UNSET
    month: str | UnsetType = UNSET
    requests: int
    requests_by_status: dict[str, int]
    prompt_tokens: int
    """All input, also what was read from a cache or written to one."""
    completion_tokens: int
    """All output, reasoning included."""
    cached_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    images: int
    compute_us: int
    charged_nano_usd: int
    charged_usd: str
    """The same amount in USD, all nine decimal places."""
    cache_hit_rate: float | None
    """Share of the good answers that were kept ones; null: there was no good answer."""
    saved_tokens: int
    """That kept answers took when they were made."""
    saved_nano_usd: int
    """What kept answers would have cost, less what they did."""
    saved_usd: str


class AdminUsageRow(UsageRow, frozen=True, kw_only=True):
    """With the tenant, the backend, and what the requests cost us."""

    tenant: str | UnsetType = UNSET
    """Name; the id, should the tenant be gone."""
    backend: str | UnsetType | None = UNSET
    """Null: no backend was reached."""
    cost_nano_usd: int
    cost_usd: str


FIELDS: Mapping[Dimension, tuple[str, ...]] = {"project": ("project", "project_id"), "key": ("key_id", "key_name")}
"""Of a dimension that has more than one; the others have one of their own name."""
COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "images",
    "compute_us",
    "saved_tokens",
)
_NULLABLE = frozenset({"backend", "end_user", "tag"})


def fields_of(dimension: Dimension) -> tuple[str, ...]:
    return FIELDS.get(dimension, (dimension,))


def told(row: Any, wanted: Collection[Dimension], labels: Mapping[str, Any]) -> AdminUsageRow:
    """A row of the statement's result. ``labels``: the time slots' names."""
    named = {}
    for dimension in wanted:
        for field in fields_of(dimension):
            value = labels[field] if field in labels else getattr(row, field)
            named[field] = None if field in _NULLABLE and value == "" else value
    return made(
        {status: int(getattr(row, f"of_{status}")) for status in STATUSES},
        {name: int(getattr(row, name)) for name in COUNTS},
        int(row.charged_nano_usd),
        int(row.cost_nano_usd),
        int(row.saved_nano_usd),
        named,
    )


def made(
    by_status: dict[str, int], counts: dict[str, int], charged: int, cost: int, saved: int, named: Mapping[str, Any]
) -> AdminUsageRow:
    values = {**named, **counts}
    good = by_status["ok"] + by_status["cache_hit"]
    return AdminUsageRow(
        requests=sum(by_status.values()),
        requests_by_status=by_status,
        charged_nano_usd=charged,
        charged_usd=usd_text(charged),
        cost_nano_usd=cost,
        cost_usd=usd_text(cost),
        cache_hit_rate=round(by_status["cache_hit"] / good, 6) if good else None,
        saved_nano_usd=saved,
        saved_usd=usd_text(saved),
        **values,
    )


def total(rows: Collection[AdminUsageRow]) -> AdminUsageRow:
    """Sums of rows that do not overlap."""
    return made(
        {status: sum(row.requests_by_status[status] for row in rows) for status in STATUSES},
        {name: sum(getattr(row, name) for row in rows) for name in COUNTS},
        sum(row.charged_nano_usd for row in rows),
        sum(row.cost_nano_usd for row in rows),
        sum(row.saved_nano_usd for row in rows),
        {},
    )


def for_tenant(row: AdminUsageRow) -> UsageRow:
    """Without what only administrators see."""
    return UsageRow(**{name: getattr(row, name) for name in UsageRow.__struct_fields__})
