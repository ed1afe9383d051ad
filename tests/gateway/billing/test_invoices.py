from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import msgspec
import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.invoice_page import invoice_page
from gateway.billing.invoices import SETTLED_AFTER, cents, invoice
from gateway.billing.markup import Markup, element, joined
from gateway.db.engine import transaction
from gateway.db.tables import audit_log, tenants
from gateway.ids import uuid7
from gateway.tenants.audit import Actor
from gateway.tenants.directory import Directory
from gateway.tenants.specs import TenantChange
from tests.gateway.billing.report_support import TENANTS, grouped, many_events, name_tenants, write
from tests.gateway.db.support import ManualClock

ACME = TENANTS[0]


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/St_Johns"])
async def test_the_total_is_the_ledgers_own_sum_in_the_tenants_zone(zone: str, engine: AsyncEngine) -> None:
    await name_tenants(engine, {ACME: "acme"})
    # Around the end of October, so that zones have different requests in it.
    events = many_events(200)
    shift = datetime(2026, 10, 31, 12, tzinfo=UTC) - min(event.admitted_at for event in events) - timedelta(hours=20)
    shifted = [msgspec.structs.replace(event, admitted_at=event.admitted_at + shift) for event in events]
    await write(engine, shifted)
    async with transaction(engine) as connection:
        await connection.execute(update(tenants).where(tenants.c.id == ACME).values(timezone=zone))
        exact = await connection.scalar(
            text(
                "SELECT sum(charged_nano_usd) FROM usage_events WHERE tenant_id = :tenant "
                "AND timezone(:zone, admitted_at) >= '2026-10-01' AND timezone(:zone, admitted_at) < '2026-11-01'"
            ),
            {"tenant": ACME, "zone": zone},
        )
    made = await invoice(engine, "acme", "2026-10", datetime(2026, 11, 1, 16, tzinfo=UTC))
    assert made.charged_nano_usd == int(exact)
    inside = [e for e in shifted if e.tenant_id == ACME and made.start <= e.admitted_at < made.end]
    assert made.requests == len(inside)
    lines = grouped(inside, lambda e: (str(e.project_id), e.route))
    assert {(line.project_id, line.model): line.charged_nano_usd for line in made.lines} == {
        key: each["charged_nano_usd"] for key, each in lines.items()
    }
    following = await invoice(engine, str(ACME), "2026-11", datetime(2026, 11, 1, tzinfo=UTC))
    everything = sum(e.charged_nano_usd for e in shifted if e.tenant_id == ACME)
    assert made.charged_nano_usd + following.charged_nano_usd == everything
    assert made.end == following.start


async def test_another_zone_or_name_leaves_past_invoices_as_they_were(engine: AsyncEngine, clock: ManualClock) -> None:
    await name_tenants(engine, {ACME: "acme", TENANTS[1]: "bolt"})
    now = datetime(2026, 11, 2, tzinfo=UTC)
    issued = await invoice(engine, "acme", "2024-10", now)
    directory = Directory(engine, clock)
    await directory.update_tenant(Actor("a"), "acme", TenantChange(name="ajax", timezone="Asia/Tokyo"))
    again = await invoice(engine, "ajax", "2024-10", now)
    assert again == msgspec.structs.replace(issued, tenant="ajax")
    # The name is free for another, whose invoices are others.
    await directory.update_tenant(Actor("a"), "bolt", TenantChange(name="acme"))
    assert (await invoice(engine, "acme", "2024-10", now)).number != issued.number


async def test_months_meet_whatever_zones_a_tenant_was_in(engine: AsyncEngine) -> None:
    await name_tenants(engine, {ACME: "acme"})
    zones = ["UTC", "Asia/Tokyo", "America/New_York", "Pacific/Kiritimati"]
    moments = [
        datetime(2026, 3, 15, tzinfo=UTC),
        datetime(2026, 4, 30, 20, tzinfo=UTC),
        datetime(2026, 6, 1, 1, tzinfo=UTC),
    ]
    async with transaction(engine) as connection:
        for at, before, after in zip(moments, zones, zones[1:], strict=False):
            told = {"before": {"timezone": before}, "after": {"timezone": after}}
            row = {"id": uuid7(), "at": at, "actor": "a", "action": "update", "kind": "tenant", "target": "acme"}
            await connection.execute(insert(audit_log).values(tenant_id=ACME, **row, **told))
        await connection.execute(update(tenants).where(tenants.c.id == ACME).values(timezone=zones[-1]))
    now = datetime(2026, 12, 1, tzinfo=UTC)
    made = [await invoice(engine, "acme", f"2026-{month:02}", now) for month in range(1, 9)]
    assert all(one.end == following.start for one, following in pairwise(made))
    # A change begins with the next month, and with the one after that if this one had begun.
    assert [one.timezone for one in made] == [*["UTC"] * 3, "Asia/Tokyo", *["America/New_York"] * 2, *[zones[-1]] * 2]
    for month, one in enumerate(made, 1):
        assert (one.start.date(), one.end.date()) == (date(2026, month, 1), date(2026, month + 1, 1))
        assert f"1 to {(one.end - timedelta(days=1)).day} {one.start:%B} 2026".encode() in invoice_page(one)


async def test_an_invoice_is_final_once_its_last_request_must_have_ended(engine: AsyncEngine) -> None:
    await name_tenants(engine, {ACME: "acme"})
    end = datetime(2026, 11, 1, tzinfo=UTC)
    for now, final in ((end, False), (end + SETTLED_AFTER, True), (end + SETTLED_AFTER - timedelta(seconds=1), False)):
        made = await invoice(engine, "acme", "2026-10", now)
        assert made.final is final
        assert (b"Preliminary" in invoice_page(made)) is not final


@pytest.mark.parametrize(
    ("nano_usd", "told"),
    [
        (0, "0.00"),
        (5_000_000, "0.00"),
        (5_000_001, "0.01"),
        (15_000_000, "0.02"),
        (25_000_000, "0.02"),
        (1_234_567_894_999_999, "1234567.89"),
        (2**63, "9223372036.85"),
    ],
)
def test_cents_are_rounded_half_to_even(nano_usd: int, told: str) -> None:
    assert cents(nano_usd) == told


def test_markup_escapes_what_it_did_not_make() -> None:
    made = element("p", "<b>&\"'", element("i", "x"), class_='a"b', data_x=1)
    assert made == '<p class="a&quot;b" data-x="1">&lt;b&gt;&amp;&quot;&#x27;<i>x</i></p>'
    assert joined("<", Markup("<hr>")) == "&lt;<hr>"
