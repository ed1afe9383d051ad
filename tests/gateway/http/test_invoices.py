from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.usage import usd_text
from gateway.db.engine import transaction
from gateway.db.tables import projects
from tests.gateway.billing.report_support import project_of
from tests.gateway.db.support import ManualClock, opened
from tests.gateway.http.usage_support import ACME, Door, report_door

NUMBER = f"2026-10-{ACME.hex[-12:]}"
HOSTILE = "</td><script>alert(1)</script>\"'&"


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=2) as engine:
        yield engine


@pytest.fixture
async def door(engine: AsyncEngine) -> AsyncIterator[Door]:
    async with report_door(engine, ManualClock(datetime(2026, 10, 26, tzinfo=UTC))) as door:
        yield door


class Page(HTMLParser):
    """Tags that are open, texts by tag, and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.fetched: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


async def test_an_invoice_is_the_ledgers_sum_as_json_and_as_a_page(door: Door, engine: AsyncEngine) -> None:
    async with transaction(engine) as connection:
        await connection.execute(update(projects).where(projects.c.id == project_of(ACME, 1)).values(name=HOSTILE))
    path = "/admin/v1/invoices/acme/2026-10"
    answer = await door.get(path)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    charged = sum(event.charged_nano_usd for event in door.of(ACME))
    assert (made["charged_nano_usd"], made["charged_usd"]) == (charged, usd_text(charged))
    assert (made["number"], made["final"]) == (NUMBER, False)
    assert "cost" not in answer.text
    by_format, by_accept = await door.get(path, format="html"), await door.get(path, accept="text/html,*/*;q=0.1")
    assert by_format.content == by_accept.content
    assert by_format.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in by_format.headers["content-security-policy"]
    page = Page(by_format.text)
    assert page.open == []
    assert page.fetched == []
    assert "<script" not in by_format.text
    texts = [text for _, text in page.texts]
    assert ("th", HOSTILE) in page.texts
    for told in (f"${float(made['total_usd']):,.2f}", NUMBER, "Preliminary: the sums may still grow"):
        assert told in texts
    assert any(f"{usd_text(charged)[-10:]} USD" in text for text in texts)


async def test_an_invoice_of_nothing_is_one_of_zero(door: Door) -> None:
    made = (await door.get("/admin/v1/invoices/bolt/2025-01")).json()
    assert (made["lines"], made["charged_usd"], made["total_usd"], made["final"]) == ([], "0.000000000", "0.00", True)
    assert "Nothing was used" in (await door.get("/admin/v1/invoices/bolt/2025-01", format="html")).text


async def test_what_cannot_be_invoiced_or_forecast_is_a_problem(door: Door) -> None:
    for path, status, word in (
        ("/admin/v1/invoices/nobody/2026-10", 404, "nobody"),
        ("/admin/v1/invoices/acme/2026-13", 400, "month"),
        ("/admin/v1/invoices/acme/october", 400, "month"),
        ("/admin/v1/invoices/acme/0000-01", 400, "month"),
        ("/admin/v1/invoices/acme/2026-10?format=pdf", 400, "format"),
        ("/admin/v1/invoices/acme/2026-10?fromat=html", 400, "fromat"),
        ("/admin/v1/invoices/%00/2026-10", 404, ""),
        ("/admin/v1/forecast/nobody", 404, "nobody"),
        ("/admin/v1/forecast/%00", 404, ""),
    ):
        answer = await door.get(path)
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert word in answer.json()["detail"]


async def test_a_forecast_is_told(door: Door) -> None:
    found = (await door.get("/admin/v1/forecast/acme")).json()
    charged = sum(
        event.charged_nano_usd for event in door.of(ACME) if event.admitted_at < datetime(2026, 10, 26, tzinfo=UTC)
    )
    assert (found["tenant"], found["month"], found["timezone"]) == ("acme", "2026-10", "Europe/Berlin")
    assert found["charged_nano_usd"] == charged
    assert found["forecast_nano_usd"] > charged
    assert (found["method"], found["budget"]) == ("days", None)
