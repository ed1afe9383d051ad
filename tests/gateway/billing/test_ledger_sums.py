"""Sums for admission's counters, against the same sums over the events themselves."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import get_args
from uuid import UUID

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.periods import EPOCH, period_at
from gateway.admission.plan import Counter
from gateway.admission.rebuild import counted, requests_of, tokens_of
from gateway.billing.entries import Entry
from gateway.billing.ledger import record
from gateway.billing.ledger_sums import PostgresSums
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from gateway.db.partitions import partition_ddl
from gateway.ids import uuid7
from gateway.tenants.principal import Subject
from tests.gateway.billing.support import NOON, TENANT, usage_event

TARGETS: dict[Subject, str] = {
    "tenant": "",
    "project": str(UUID(int=1)),
    "key": "key1",
    "model": "large",
    "end_user": "ada",
}
EVER = period_at("total", "UTC", NOON)


def events(count: int) -> list[UsageEvent]:
    source = random.Random(7)
    return [
        usage_event(
            tenant_id=source.choice((TENANT, TENANT, UUID(int=99))),
            admitted_at=NOON + timedelta(milliseconds=source.randrange(86_400_000)),
            project_id=UUID(int=source.randrange(1, 3)),
            key_id=source.choice(("key1", "key2")),
            route=source.choice(("tiny", "large")),
            end_user=source.choice((None, "ada", "bob")),
            status=source.choice(("ok", "failed", "abandoned")),
            attempts=source.randrange(2),
            prompt_tokens=source.randrange(1000),
            completion_tokens=source.randrange(100),
            charged_nano_usd=source.randrange(10**9),
        )
        for _ in range(count)
    ]


@pytest.fixture
async def ledger(database_url: str, engine: AsyncEngine) -> list[UsageEvent]:
    with psycopg.connect(database_url) as connection:
        connection.execute(partition_ddl(NOON))
    written = events(300)
    async with transaction(engine, timeout_s=10) as connection:
        await record(connection, [Entry("1-0", b"", event, 1) for event in written])
    return written


@pytest.mark.parametrize("start", [NOON, NOON + timedelta(hours=2, milliseconds=1), EVER.start])
@pytest.mark.parametrize("end", [NOON + timedelta(hours=5, minutes=7), NOON + timedelta(hours=2, minutes=3), EVER.end])
async def test_charges_are_those_of_the_events_that_match(
    engine: AsyncEngine, ledger: list[UsageEvent], start: datetime, end: datetime
) -> None:
    sums = PostgresSums(engine)
    left_out = {event.request_id for event in ledger[::3]} | {uuid7()}
    for subject in get_args(Subject):
        counter = Counter("budget", "total", subject, TARGETS[subject])
        for excluding in (set[UUID](), left_out):
            expected = sum(
                event.charged_nano_usd
                for event in ledger
                if event.tenant_id == TENANT
                and counted(counter, event)
                and start <= event.admitted_at < end
                and event.request_id not in excluding
            )
            found = await sums.charged(
                TENANT, start, end, subject=subject, target=TARGETS[subject], excluding=excluding
            )
            assert found == expected, (subject, len(excluding))


@pytest.mark.parametrize("width_s", [1, 60, 1440])
async def test_buckets_are_those_of_the_events_that_match(
    engine: AsyncEngine, ledger: list[UsageEvent], width_s: int
) -> None:
    sums = PostgresSums(engine)
    since = datetime.fromtimestamp((NOON.timestamp() + 40_000) // width_s * width_s, UTC)
    excluding = {event.request_id for event in ledger[::4]}
    for subject in get_args(Subject):
        counter = Counter("tokens", "day", subject, TARGETS[subject])
        expected: dict[int, tuple[int, int]] = {}
        for event in ledger:
            if event.tenant_id != TENANT or event.request_id in excluding or event.admitted_at < since:
                continue
            if counted(counter, event):
                bucket = (event.admitted_at - EPOCH) // timedelta(seconds=width_s)
                requests, tokens = expected.get(bucket, (0, 0))
                expected[bucket] = (requests + requests_of(event), tokens + tokens_of(event))
        rows = await sums.used(
            TENANT, since, width_s=width_s, subject=subject, target=TARGETS[subject], excluding=excluding
        )
        assert {bucket: (requests, tokens) for bucket, requests, tokens in rows} == expected
