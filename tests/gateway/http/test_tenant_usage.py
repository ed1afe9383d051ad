"""A tenant reads its own usage: what was charged, never what it cost, never another's."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.billing.export import csv_of
from gateway.billing.local_time import slots
from gateway.billing.report_rows import for_tenant, told
from gateway.ids import uuid7
from tests.gateway.billing.report_support import BEGIN, TENANTS, many_events, project_of, sums
from tests.gateway.billing.support import usage_event
from tests.gateway.db.support import ManualClock, opened
from tests.gateway.http.usage_support import ACME, ALICE, BOLT, Door, report_door

PATH = "/v1/usage"
OURS = {"cost_nano_usd", "cost_usd"}


@pytest.fixture
async def door(database_url: str) -> AsyncIterator[Door]:
    events = [
        *many_events(200),
        usage_event(
            tenant_id=ACME,
            project_id=project_of(ACME, 1),
            admitted_at=BEGIN,
            end_user=ALICE,
            backend="b1",
            tags=["x", "y=z"],
            first_token_ms=5,
            queue_ms=1,
            client_request_id="mine",
            charged_nano_usd=1_234_567_890_123,
        ),
    ]
    clock = ManualClock(datetime(2026, 10, 26, tzinfo=UTC))
    async with opened(database_url, pool_size=2) as engine, report_door(engine, clock, events) as door:
        yield door


def told_as_openai_does(answer: Any, status: int, code: str | None, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]


async def test_a_tenant_sees_its_own_requests_without_their_cost(door: Door) -> None:
    (row,) = await door.data(PATH, "acme")
    assert row == {name: value for name, value in sums(door.of(ACME)).items() if name not in OURS}
    for group_by in ("project", "key", "model", "end_user", "tag", "status", "hour", "day", "month"):
        text = (await door.get(PATH, "acme", group_by=group_by)).text
        for hidden in ("cost", "b1", str(BOLT), str(TENANTS[2]), str(project_of(BOLT, 1)), "bolt"):
            assert hidden not in text, (group_by, hidden)
    days = await door.data(PATH, "acme", group_by="day")
    # Its own zone, Berlin's, unless it asks for another: 23:30 UTC is the next day's.
    assert days == await door.data(PATH, "acme", group_by="day", timezone="Europe/Berlin")
    assert days != await door.data(PATH, "acme", group_by="day", timezone="UTC")


async def test_end_users_go_by_the_tenants_own_ids(door: Door) -> None:
    (row,) = await door.data(PATH, "acme", end_user="alice", group_by="end_user")
    assert (row["end_user"], row["requests"]) == (ALICE, 1)
    assert await door.data(PATH, "bolt", end_user="alice") == []
    assert await door.data(PATH, "bolt", end_user=ALICE) == []


async def test_who_may_read(door: Door) -> None:
    request = door.of(ACME)[0].request_id
    for path in (PATH, f"{PATH}/{request}"):
        told_as_openai_does(await door.get(path, None), 401, "invalid_api_key")
        told_as_openai_does(await door.get(path, "nonsense"), 401, "invalid_api_key")
        told_as_openai_does(await door.get(path, "owner"), 401, "invalid_api_key")
        told_as_openai_does(await door.get(path, "acme-inference"), 403, "insufficient_scope")
        assert (await door.get(path, "acme")).status_code == 200
    for path in ("/admin/v1/usage", "/admin/v1/invoices/acme/2026-10", "/admin/v1/forecast/acme"):
        for key in (None, "acme", "nonsense"):
            assert (await door.get(path, key)).status_code == 401
        for key in ("viewer", "owner"):
            assert (await door.get(path, key)).status_code == 200


async def test_what_is_not_a_tenants_own_is_not_there(door: Door) -> None:
    keys = await door.data("/admin/v1/usage", group_by="key", tenant="bolt")
    assert keys
    for parameter, value in (
        ("project", str(project_of(BOLT, 1))),
        ("project", "nothing"),
        ("key", "bolt-key"),
        ("key", "nokey"),
    ):
        told_as_openai_does(await door.get(PATH, "acme", **{parameter: value}), 404, "not_found", parameter)
    for request_id in (door.of(BOLT)[0].request_id, uuid7(), "nonsense", "%00"):
        told_as_openai_does(await door.get(f"{PATH}/{request_id}", "acme"), 404, "not_found", "request_id")


async def test_parameters_that_cannot_be_meant_are_named(door: Door) -> None:
    cases = [("group_by", value) for value in ("tenant", "backend", "planet")]
    cases += [("order_by", "-cost"), ("order_by", "backend"), ("backend", "b1"), ("tenant", "bolt"), ("nonsense", "1")]
    cases += [("timezone", "Mars/Olympus"), ("start", "yesterday"), ("cursor", "x"), ("limit", "many")]
    for parameter, value in cases:
        told_as_openai_does(await door.get(PATH, "acme", **{parameter: value}), 400, "bad_request", parameter)


async def test_one_request_is_shown_with_all_that_its_tenant_may_see(door: Door) -> None:
    event = door.events[-1]
    answer = await door.get(f"{PATH}/{event.request_id}", "acme")
    assert answer.status_code == 200
    assert answer.json() == {
        "request_id": str(event.request_id),
        "admitted_at": "2026-10-23T20:00:00Z",
        "project": "web",
        "project_id": str(event.project_id),
        "key_id": "key",
        "key_name": None,
        "model": "m",
        "status": "ok",
        "streamed": False,
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        "reasoning_tokens": 0,
        "images": 0,
        "compute_us": 0,
        "usage_source": "backend",
        "charged_nano_usd": 1_234_567_890_123,
        "charged_usd": "1234.567890123",
        "price_id": str(event.price_id),
        "over_bound": False,
        "attempts": 0,
        "error_code": None,
        "client_request_id": "mine",
        "queue_ms": 1,
        "first_token_ms": 5,
        "total_ms": None,
        "end_user": ALICE,
        "tags": ["x", "y=z"],
        "cache": None,
        "saved_nano_usd": 0,
        "saved_tokens": 0,
    }


def test_the_reference_tells_parameters_answers_and_errors(door: Door) -> None:
    paths = door.app.openapi_schema.to_schema()["paths"]
    for path, problems, more in (
        ("/v1/usage", False, {"text/csv"}),
        ("/v1/usage/{request_id}", False, set()),
        ("/admin/v1/usage", True, {"text/csv"}),
        ("/admin/v1/invoices/{tenant}/{month}", True, {"text/html"}),
        ("/admin/v1/forecast/{tenant}", True, set()),
    ):
        responses = paths[path]["get"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "503"}, path
        assert set(responses["200"]["content"]) == {"application/json", *more}
        media_type = "application/problem+json" if problems else "application/json"
        assert all(set(responses[status]["content"]) == {media_type} for status in responses if status != "200")
    named = {parameter["name"] for parameter in paths["/v1/usage"]["get"]["parameters"]}
    assert named.isdisjoint({"tenant", "backend"})
    assert {"start", "end", "group_by", "end_user", "tag", "cursor", "format"} <= named


@pytest.mark.parametrize("format", ["json", "csv"])
async def test_making_a_report_does_not_hold_up_the_event_loop(
    format: str, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {}

    def seen(name: str, work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread()
            return work(*args, **kwargs)

        return run

    for name, work in (
        ("gateway.billing.reports.slots", slots),
        ("gateway.billing.report_statement.told", told),
        ("gateway.http.usage_answer.for_tenant", for_tenant),
        ("gateway.http.usage_answer.csv_of", csv_of),
    ):
        monkeypatch.setattr(name, seen(name, work))
    assert (await door.get(PATH, "acme", group_by="hour", format=format)).status_code == 200
    assert len(threads) == (4 if format == "csv" else 3)
    assert threading.current_thread() not in threads.values()
