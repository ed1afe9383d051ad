from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import insert

from gateway.billing.usage import UsageEvent, usd_text
from gateway.db.engine import transaction
from gateway.db.tables import limits
from gateway.secret_key import SecretKey
from gateway.tenants.end_users import end_user_hash
from tests.gateway.billing.report_support import TENANTS, name_tenants, project_of, write
from tests.gateway.billing.support import usage_event
from tests.gateway.db.support import opened

Penstock = Callable[..., Result]
ACME, BOLT = TENANTS[:2]
ALICE = end_user_hash(SecretKey("secret-key-of-the-tests-of-this-command"), ACME, "alice")


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def event(tenant: Any, hour: int, **changes: Any) -> UsageEvent:
    moment = datetime(2024, 5, 30, hour, 5, tzinfo=UTC)
    return usage_event(tenant_id=tenant, project_id=project_of(tenant, 1), admitted_at=moment, **changes)


EVENTS = [
    event(ACME, 9, route="m", charged_nano_usd=10**9, tags=["x", "=2+3"], key_id="acme-key", end_user=ALICE),
    event(ACME, 23, route="n", charged_nano_usd=3, backend="b1", tags=["x"]),
    event(BOLT, 9, route="m", charged_nano_usd=2 * 10**9, status="cache_hit"),
]


@pytest.fixture
def filled(penstock: Penstock, database_url: str) -> Penstock:
    async def fill() -> None:
        async with opened(database_url) as engine:
            await name_tenants(engine, {ACME: "acme", BOLT: "bolt"})
            await write(engine, EVENTS)
            async with transaction(engine) as connection:
                await connection.execute(
                    insert(limits).values(
                        id=project_of(ACME, 9),
                        tenant_id=ACME,
                        subject="tenant",
                        metric="budget",
                        window="month",
                        amount=5 * 10**9,
                    )
                )

    asyncio.run(fill())
    return penstock


def test_usage_is_grouped_filtered_ordered_and_cut(filled: Penstock) -> None:
    def charged(*options: str) -> list[str]:
        rows = json.loads(ok(filled("usage", "--json", *options)))["data"]
        return [row["charged_usd"] for row in rows]

    first, second, third = (usd_text(each.charged_nano_usd) for each in EVENTS)
    assert charged("--group-by", "model", "--tenant", "acme") == [first, second]
    assert charged("--group-by", "route", "--tenant", "acme") == [first, second]
    assert charged("--group-by", "tenant", "--order-by", "-charged") == [third, usd_text(10**9 + 3)]
    assert charged("--group-by", "tenant", "--order-by", "-charged", "--limit", "1") == [third]
    assert charged("--key", "acme-key") == charged("--end-user", "alice", "--tenant", "acme") == [first]
    assert charged("--backend", "b1") == charged("--tag", "x", "--model", "n") == [second]
    assert charged("--project", "web", "--status", "cache_hit", "--month", "2024-05") == [third]
    # At 23:05 UTC it is the next day in Berlin, and the day after next begins there before it does in UTC.
    days = json.loads(ok(filled("usage", "--json", "--group-by", "day", "--timezone", "Europe/Berlin")))["data"]
    assert [(row["day"], row["requests"]) for row in days] == [("2024-05-30", 2), ("2024-05-31", 1)]


def test_tables_tell_names_and_what_they_leave_out(filled: Penstock) -> None:
    lines = ok(filled("usage", "--group-by", "key", "--group-by", "project", "--tenant", "acme")).splitlines()
    titles = "KEY ID  KEY NAME  PROJECT  REQUESTS  OK  PROMPT TOKENS  COMPLETION TOKENS  CHARGED USD"
    assert lines[0].split() == titles.split()
    assert lines[1].split() == ["acme-key", "key", "of", "acme", "web", "1", "1", "9", "3", "1.000000000"]
    assert lines[2].split() == ["key", "-", "web", "1", "1", "9", "3", "0.000000003"]
    assert lines[3].split()[0] == "total"
    # One request has two tags, so lines do not add up.
    tags = ok(filled("usage", "--group-by", "tag"))
    assert "total" not in tags
    assert "'=2+3" in tags
    cut = filled("usage", "--group-by", "tenant", "--limit", "1")
    assert "total" not in ok(cut)
    assert "more lines" in cut.stderr


def test_usage_as_csv(filled: Penstock) -> None:
    told = filled("usage", "--group-by", "tag", "--format", "csv").stdout_bytes.decode()
    rows = list(csv.DictReader(io.StringIO(told, newline="")))
    assert [(row["tag"], row["requests"], row["cost_nano_usd"]) for row in rows] == [
        ("", "1", "2100"),
        ("'=2+3", "1", "2100"),
        ("x", "2", "4200"),
    ]
    assert told.count("\r\n") == len(rows) + 1


def test_a_forecast_stands_beside_the_budget(filled: Penstock) -> None:
    lines = ok(filled("usage", "--forecast", "--tenant", "acme")).splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["0.000000000", "0.000000000", "5.000000000", "5.000000000"]
    found = json.loads(ok(filled("usage", "--forecast", "--tenant", "acme", "--json")))
    assert (found["charged_nano_usd"], found["budget"]["amount_usd"]) == (0, "5.000000000")
    assert filled("usage", "--forecast").exit_code != 0
    for ignored in (("--month", "2024-05"), ("--format", "csv"), ("--start", "2024-05-01"), ("--group-by", "model")):
        refused = filled("usage", "--forecast", "--tenant", "acme", *ignored)
        assert refused.exit_code != 0
        assert "only --tenant and --json" in refused.stderr
    missing = filled("usage", "--forecast", "--tenant", "nobody")
    assert missing.exit_code != 0
    assert "nobody" in missing.stderr


def test_an_invoice_is_shown_and_written(filled: Penstock, tmp_path: Path) -> None:
    lines = ok(filled("invoice", "acme", "2024-05")).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["web", "m", "1", "9", "3", "1.000000000"],
        ["web", "n", "1", "9", "3", "0.000000003"],
        ["total", "2", "18", "6", "1.000000003"],
    ]
    assert lines[-1] == "Rounded to cents: 1.00 USD"
    made = json.loads(ok(filled("invoice", "acme", "2024-05", "--format", "json")))
    assert (made["charged_usd"], made["final"]) == ("1.000000003", True)
    page = tmp_path / "invoice.html"
    ok(filled("invoice", "acme", "2024-05", "--format", "html", "--output", str(page)))
    assert made["number"] in page.read_text()
    for arguments, word in (
        (("nobody", "2024-05"), "nobody"),
        (("acme", "2024-13"), "month"),
        (("acme", "2024-05", "--output", str(page)), "--format"),
    ):
        refused = filled("invoice", *arguments)
        assert refused.exit_code != 0
        assert word in refused.stderr
