"""A ledger full of requests, and the sums that a report of them must show."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.entries import Entry
from gateway.billing.ledger import ensure_partition, record
from gateway.billing.report_query import STATUSES, UsageQuery
from gateway.billing.report_rows import COUNTS, AdminUsageRow
from gateway.billing.reports import usage_report
from gateway.billing.usage import UsageEvent, usd_text
from gateway.db.engine import transaction
from gateway.db.partitions import months_ahead
from gateway.db.tables import api_keys, projects, tenants
from tests.gateway.billing.support import usage_event

BEGIN = datetime(2026, 10, 23, 20, tzinfo=UTC)
HOURS = 60
"""They hold the end of summer time in Europe: a day of 25 hours."""
TENANTS = [UUID(int=1), UUID(int=2), UUID(int=3)]


def project_of(tenant: UUID, number: int) -> UUID:
    return UUID(int=tenant.int * 100 + number)


async def write(engine: AsyncEngine, events: Iterable[UsageEvent]) -> None:
    entries = [Entry("1-0", b"", event, 1) for event in events]
    async with transaction(engine, timeout_s=20) as connection:
        for month in months_ahead(min(entry.event.admitted_at for entry in entries), 1):
            await ensure_partition(connection, month)
        await record(connection, entries)


async def name_tenants(engine: AsyncEngine, names: dict[UUID, str]) -> None:
    """Each with the projects 1 and 2, named web and batch, and a key named after the first letter of its name."""
    async with transaction(engine) as connection:
        for tenant, name in names.items():
            await connection.execute(insert(tenants).values(id=tenant, name=name, salt="s"))
            for number, project in ((1, "web"), (2, "batch")):
                await connection.execute(
                    insert(projects).values(id=project_of(tenant, number), tenant_id=tenant, name=project)
                )
            await connection.execute(
                insert(api_keys).values(
                    public_id=f"{name}-key",
                    tenant_id=tenant,
                    project_id=project_of(tenant, 1),
                    name=f"key of {name}",
                    secret_sha256=bytes(32),
                    scopes=["usage:read"],
                )
            )


def many_events(count: int = 400, seed: int = 11) -> list[UsageEvent]:
    """At every odd moment, on the edges of quarter hours and just beside them too."""
    chance = random.Random(seed)
    events = []
    for _ in range(count):
        moment = BEGIN + timedelta(microseconds=chance.randrange(HOURS * 3600 * 10**6))
        if chance.random() < 0.5:
            quarter = moment.replace(minute=moment.minute // 15 * 15, second=0, microsecond=0)
            moment = quarter + timedelta(microseconds=chance.choice([-1, 0, 1]))
        tenant = chance.choice(TENANTS)
        events.append(
            usage_event(
                admitted_at=max(moment, BEGIN),
                tenant_id=tenant,
                project_id=project_of(tenant, chance.randint(1, 2)),
                key_id=chance.choice(["k1", "k2"]),
                route=chance.choice(["m", "n"]),
                backend=chance.choice([None, "b1", "b2"]),
                status=chance.choice(STATUSES),
                prompt_tokens=chance.randrange(1000),
                completion_tokens=chance.randrange(1000),
                cached_tokens=chance.randrange(10),
                cache_write_tokens=chance.randrange(10),
                reasoning_tokens=chance.randrange(10),
                images=chance.randrange(3),
                compute_us=chance.randrange(10**9),
                charged_nano_usd=chance.randrange(2**40),
                cost_nano_usd=chance.randrange(2**40),
                saved_nano_usd=chance.randrange(2**40),
                saved_tokens=chance.randrange(1000),
                end_user=chance.choice([None, "a" * 32, "b" * 32]),
                tags=chance.choice([[], ["x"], ["team=red", "x"], ["y"]]),
            )
        )
    return events


def sums(events: Iterable[UsageEvent]) -> dict[str, Any]:
    events = list(events)
    charged, cost, saved = (
        sum(getattr(event, f"{name}_nano_usd") for event in events) for name in ("charged", "cost", "saved")
    )
    hits, good = (sum(event.status in of for event in events) for of in (("cache_hit",), ("ok", "cache_hit")))
    return {
        "requests": len(events),
        "requests_by_status": {status: sum(event.status == status for event in events) for status in STATUSES},
        **{name: sum(getattr(event, name) for event in events) for name in COUNTS},
        "charged_nano_usd": charged,
        "charged_usd": usd_text(charged),
        "cost_nano_usd": cost,
        "cost_usd": usd_text(cost),
        "cache_hit_rate": round(hits / good, 6) if good else None,
        "saved_nano_usd": saved,
        "saved_usd": usd_text(saved),
    }


_MEASURES = tuple(sums([]))


def measures(row: AdminUsageRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _MEASURES}


async def report(engine: AsyncEngine, **query: Any) -> list[AdminUsageRow]:
    return (await usage_report(engine, UsageQuery(**query))).rows


def grouped(events: Sequence[UsageEvent], key: Any) -> dict[Any, dict[str, Any]]:
    apart: dict[Any, list[UsageEvent]] = {}
    for event in events:
        apart.setdefault(key(event), []).append(event)
    return {name: sums(inside) for name, inside in sorted(apart.items())}
