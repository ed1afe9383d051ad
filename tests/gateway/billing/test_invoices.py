from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.invoice_page import invoice_page
from gateway.billing.invoices import SETTLED_AFTER, cents, invoice
from gateway.billing.markup import Markup, element, joined
from gateway.db.engine import transaction
from gateway.db.tables import tenants
from tests.gateway.billing.report_support import TENANTS, grouped, many_events, name_tenants, write

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
