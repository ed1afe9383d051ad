from __future__ import annotations

import asyncio
import json

import pytest

from gateway.billing.entries import Entry
from gateway.billing.ledger import ensure_partition, record
from gateway.db.engine import transaction
from tests.gateway.billing.support import usage_event
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened


async def _spoil(url: str) -> None:

    event = usage_event()
    async with opened(url, pool_size=1) as engine, transaction(engine) as connection:
        await ensure_partition(connection, event.admitted_at)
        await record(connection, [Entry("1-0", b"", event, 1)])
        await connection.exec_driver_sql("UPDATE usage_rollup SET requests = 3")


def test_verify_says_what_differs_and_exits_with_1(penstock: Penstock, database_url: str) -> None:
    ok(penstock("tenant", "create", "acme"))
    assert "All agrees." in ok(penstock("verify"))
    assert json.loads(ok(penstock("verify", "--tenant", "acme", "--json"))) == {
        "agrees": True,
        "differences": [],
        "busy": [],
        "tenants": 1,
        "counters": 0,
        "unchecked": 0,
        "running": 0,
        "remembered": 0,
        "refusals_waiting": 0,
        "dead": 0,
    }
    refused(penstock("verify", "--tenant", "nobody"), "nobody")

    asyncio.run(_spoil(database_url))
    told = penstock("verify")
    assert told.exit_code == 1
    [line] = [line for line in told.stdout.splitlines() if line.startswith("rollup")]
    assert "bucket=2024-06-03T12:00:00+00:00" in line
    assert "route=m" in line
    assert line.split()[-3:] == ["1", "3", "+2"]
    assert "1 differences" in told.stderr
    told = penstock("verify", "--json")
    assert told.exit_code == 1
    [difference] = json.loads(told.stdout)["differences"]
    assert (difference["kind"], difference["sum"], difference["difference"]) == ("rollup", "requests", 2)
    ok(penstock("verify", "--tenant", "acme"))


def test_verify_without_redis_says_so(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:

    ok(penstock("tenant", "create", "acme"))
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    refused(penstock("verify"), "Redis")
