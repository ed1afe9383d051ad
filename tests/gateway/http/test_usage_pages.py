from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.gateway.billing.report_support import grouped, sums
from tests.gateway.db.support import ManualClock, opened
from tests.gateway.http.usage_support import ACME, Door, report_door

PATH = "/admin/v1/usage"


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=2) as engine:
        yield engine


@pytest.fixture
async def door(engine: AsyncEngine) -> AsyncIterator[Door]:
    async with report_door(engine, ManualClock(datetime(2026, 10, 26, tzinfo=UTC))) as door:
        yield door


async def pages(door: Door, **parameters: Any) -> list[dict[str, Any]]:
    """All rows, page by page, by the links of the answers."""
    answer = await door.get(PATH, **parameters)
    found: list[dict[str, Any]] = []
    for _ in range(200):
        assert answer.status_code == 200, answer.text
        body = answer.json()
        found += body["data"]
        assert (body["next_cursor"] is None) == ("link" not in answer.headers)
        if body["next_cursor"] is None:
            return found
        assert len(body["data"]) == parameters["limit"]
        answer = await door.get(answer.links["next"]["url"])
    raise AssertionError("pages without end")


PAGED: list[dict[str, Any]] = [
    {"group_by": ["tenant", "key", "model"]},
    {"group_by": ["project", "status"], "order_by": "-charged"},
    {"group_by": ["hour", "backend"], "timezone": "Asia/Kathmandu"},
    {"group_by": ["model", "day"], "order_by": "-day", "timezone": "Europe/Berlin"},
    {"group_by": ["end_user", "tag", "month"], "order_by": "requests"},
    {"group_by": ["status", "backend"], "order_by": "-requests", "model": "m"},
]


async def test_pages_hold_every_line_once_and_in_order(door: Door) -> None:
    for parameters in PAGED:
        whole = await door.data(PATH, **parameters, limit=10_000)
        assert len(whole) > 5
        for limit in (max(1, len(whole) // 8), len(whole)):
            assert await pages(door, **parameters, limit=limit) == whole, parameters


async def test_the_dearest_come_first(door: Door) -> None:
    rows = await door.data(PATH, group_by=["project", "model"], order_by="-charged", limit=3)
    dearest = sorted(
        grouped(door.events, lambda e: (e.project_id, e.route)).values(), key=lambda s: -s["charged_nano_usd"]
    )
    assert [row["charged_nano_usd"] for row in rows] == [each["charged_nano_usd"] for each in dearest[:3]]


async def test_a_cursor_goes_with_its_query_alone(door: Door) -> None:
    asked = {"group_by": ["tenant", "key"], "limit": 2}
    cursor = (await door.get(PATH, **asked)).json()["next_cursor"]
    assert len(await door.data(PATH, **asked, cursor=cursor)) == 2
    # How many rows a page has changes nothing about their order.
    assert len(await door.data(PATH, **(asked | {"limit": 3}), cursor=cursor)) == 3
    wrong: list[dict[str, Any]] = [
        {"group_by": ["key", "tenant"]},
        {"group_by": ["tenant"]},
        {"order_by": "-charged"},
        {"tenant": "acme"},
        {"timezone": "Europe/Berlin"},
        {"start": "2026-10-24T00:00:00Z"},
        {"cursor": cursor[:-3]},
        {"cursor": "A" + cursor[1:]},
        {"cursor": ""},
        {"cursor": "%00"},
        {"cursor": "bm9uc2Vuc2U"},
    ]
    for change in wrong:
        answer = await door.get(PATH, **(asked | {"cursor": cursor} | change))
        assert answer.status_code == 400, change
        assert "cursor" in answer.json()["detail"]
    own = await door.get("/v1/usage", "acme", group_by="key", limit=1)
    stolen = await door.get("/v1/usage", "bolt", group_by="key", limit=1, cursor=own.json()["next_cursor"])
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (400, "cursor")


async def test_csv_holds_what_json_holds(door: Door) -> None:
    asked: dict[str, Any] = {"group_by": ["tenant", "project", "key", "backend", "day"], "timezone": "Europe/Berlin"}
    rows = await door.data(PATH, **asked)
    by_format = await door.get(PATH, **asked, format="csv")
    by_accept = await door.get(PATH, **asked, accept="text/csv;q=0.9, application/json;q=0.5")
    assert by_format.content == by_accept.content
    assert by_format.headers["content-type"].startswith("text/csv")
    assert "usage.csv" in by_format.headers["content-disposition"]
    lines = list(csv.DictReader(io.StringIO(by_format.text)))
    assert by_format.text.count("\r\n") == len(rows) + 1
    for line, row in zip(lines, rows, strict=True):
        statuses = {f"requests_{status}": count for status, count in row.pop("requests_by_status").items()}
        assert line == {name: "" if value is None else str(value) for name, value in (row | statuses).items()}
    own = await door.get("/v1/usage", "acme", group_by=["model"], format="csv")
    assert "cost" not in own.text
    assert "application/json" in (await door.get(PATH, accept="*/*")).headers["content-type"]


async def test_json_tells_range_zone_and_exact_amounts(door: Door) -> None:
    body = (await door.get(PATH, tenant="acme", start="2026-10-24T00:00:00+02:00")).json()
    inside = [e for e in door.of(ACME) if e.admitted_at >= datetime(2026, 10, 23, 22, tzinfo=UTC)]
    assert body == {
        "start": "2026-10-24T00:00:00+02:00",
        "end": None,
        "timezone": "UTC",
        "data": [sums(inside)],
        "next_cursor": None,
    }
