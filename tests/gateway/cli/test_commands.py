from __future__ import annotations

import asyncio
import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.drainer import Drainer
from gateway.billing.usage import UsageEvent
from gateway.cli import main
from gateway.clock import SystemClock
from gateway.db.migrate import upgrade
from gateway.redis_url import client as redis_client
from gateway.tenants.keys import parse_key
from gateway.tenants.principal import Principal
from gateway.tenants.service import Tenants
from tests.gateway.billing.support import Stream, usage_event
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened
from tests.gateway.tenants.support import shape
from tests.ports import free_port


async def _authenticate(database_url: str, key: str) -> Principal:
    async with opened(database_url) as engine:
        return await Tenants(engine, SystemClock()).authenticate(key)


async def _drain(database_url: str, redis_url: str, *events: UsageEvent | bytes) -> None:
    with redis_client(redis_url, decode_responses=True) as client:
        stream = Stream(client)
        for event in events:
            stream.add(event)
    async with opened(database_url) as engine:
        drainer = Drainer(engine, redis_url, SystemClock())
        assert await drainer.drain_once() == len(events)
        await drainer.close()


def test_a_tenant_with_a_key_can_call(penstock: Penstock, database_url: str) -> None:
    ok(penstock("tenant", "create", "acme", "--requests-per-minute", "60", "--budget", "25.50"))
    key = ok(penstock("key", "create", "--tenant", "acme", "--expires", "30d", "--model", "m")).strip()
    assert parse_key(key)
    principal = asyncio.run(_authenticate(database_url, key))
    assert principal.tenant_name == "acme"
    assert shape(principal.tenant_limits) == {
        ("tenant", "", "requests", "minute", 60),
        ("tenant", "", "budget", "month", 25_500_000_000),
    }
    assert principal.allowed_models == {"m"}


def test_a_secret_is_shown_once(penstock: Penstock) -> None:
    ok(penstock("tenant", "create", "acme"))
    shown = penstock("key", "create", "--tenant", "acme")
    parsed = parse_key(ok(shown).strip())
    assert parsed
    public_id, secret = parsed
    assert secret not in shown.stderr
    listed = ok(penstock("key", "list", "--tenant", "acme"))
    assert public_id in listed
    assert secret not in listed


def test_limits_are_changed_one_by_one_and_lifted(penstock: Penstock, database_url: str) -> None:
    ok(penstock("tenant", "create", "acme", "--max-concurrent", "4", "--budget", "1", "--period", "day"))
    ok(penstock("tenant", "set", "acme", "--requests-per-minute", "0"))
    ok(penstock("tenant", "set", "acme", "--timezone", "Europe/Berlin", "--max-concurrent", "unlimited"))
    key = ok(penstock("key", "create", "--tenant", "acme")).strip()
    principal = asyncio.run(_authenticate(database_url, key))
    assert principal.timezone == "Europe/Berlin"
    assert shape(principal.tenant_limits) == {
        ("tenant", "", "requests", "minute", 0),
        ("tenant", "", "budget", "day", 10**9),
    }
    shown = ok(penstock("tenant", "set", "acme", "--budget", "unlimited"))
    assert shown.splitlines()[1].split()[:6] == ["acme", "0", "-", "-", "-", "Europe/Berlin"]
    assert ok(penstock("tenant", "list")) == shown


def test_a_change_is_announced_to_gateways(penstock: Penstock, database_url: str, redis_url: str) -> None:
    ok(penstock("tenant", "create", "acme"))
    key = ok(penstock("key", "create", "--tenant", "acme")).strip()
    principal = asyncio.run(_authenticate(database_url, key))
    ok(penstock("tenant", "set", "acme", "--requests-per-minute", "1"))
    with redis_client(redis_url, decode_responses=True) as client:
        announced = client.hget(f"{principal.shard}:tenant:{principal.tenant_id}", "generation")
    assert int(str(announced)) == principal.generation + 1


def test_a_revoked_key_is_refused(penstock: Penstock, database_url: str) -> None:
    ok(penstock("tenant", "create", "acme"))
    key = ok(penstock("key", "create", "--tenant", "acme")).strip()
    parsed = parse_key(key)
    assert parsed
    assert "revoked" in ok(penstock("key", "revoke", parsed[0]))
    with pytest.raises(Exception, match="not valid"):
        asyncio.run(_authenticate(database_url, key))


def test_admin_keys(penstock: Penstock) -> None:
    parsed = parse_key(ok(penstock("admin-key", "create", "--name", "root")).strip())
    assert parsed
    assert f"{parsed[0]}  root" in ok(penstock("admin-key", "list"))
    ok(penstock("admin-key", "revoke", parsed[0]))


def test_usage_shows_requests_tokens_and_cost(penstock: Penstock, database_url: str, redis_url: str) -> None:
    ok(penstock("tenant", "create", "acme"))
    assert "No usage" in ok(penstock("usage", "--tenant", "acme"))
    key = ok(penstock("key", "create", "--tenant", "acme")).strip()
    tenant_id = asyncio.run(_authenticate(database_url, key)).tenant_id
    now = datetime.now(UTC)
    events = [
        usage_event(tenant_id=tenant_id, admitted_at=now, status=status, route=route, charged_nano_usd=charged)
        for status, route, charged in (("ok", "m", 2100), ("aborted", "m", 5), ("ok", "n", 10**9), ("failed", "n", 0))
    ]
    asyncio.run(_drain(database_url, redis_url, *events, usage_event(admitted_at=now)))

    shown = penstock("usage", "--tenant", "acme")
    lines = [line.split() for line in ok(shown).splitlines()]
    assert shown.stderr == ""
    # A status that no request had has no column.
    assert lines[0][:6] == ["MODEL", "REQUESTS", "OK", "ABORTED", "FAILED", "PROMPT"]
    assert lines[1:] == [
        ["m", "2", "1", "1", "0", "18", "6", "0.000002105"],
        ["n", "2", "1", "0", "1", "18", "6", "1.000000000"],
        ["total", "4", "2", "1", "1", "36", "12", "1.000002105"],
    ]
    everyone = ok(penstock("usage")).splitlines()
    assert [line.split()[0] for line in everyone[1:]] == [str(events_tenant()), "acme", "acme", "total"]

    report = json.loads(ok(penstock("usage", "--tenant", "acme", "--json", "--group-by", "status")))
    assert report["tenant"] == "acme"
    assert [(row["status"], row["requests"], row["charged_usd"]) for row in report["data"]] == [
        ("aborted", 1, "0.000000005"),
        ("failed", 1, "0.000000000"),
        ("ok", 2, "1.000002100"),
    ]
    tomorrow = (now + timedelta(days=1)).date().isoformat()
    assert "No usage" in ok(penstock("usage", "--tenant", "acme", "--start", tomorrow))
    assert ok(penstock("usage", "--tenant", "acme", "--end", tomorrow)) == shown.stdout


def events_tenant() -> object:
    return usage_event().tenant_id


def test_usage_tells_of_events_that_are_in_no_report(penstock: Penstock, database_url: str, redis_url: str) -> None:
    asyncio.run(_drain(database_url, redis_url, b"poison"))
    shown = penstock("usage")
    assert shown.exit_code == 0
    assert "1 usage events could not be recorded" in shown.stderr
    assert "`penstock dead list`" in shown.stderr
    assert "Warning" not in shown.stdout
    ok(penstock("tenant", "create", "acme"))
    invoice = penstock("invoice", "acme", "2024-05")
    assert invoice.exit_code == 0
    assert "1 usage events could not be recorded" in invoice.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("usage", "--tenant", "nobody"), ("nobody", "penstock tenant list")),
        (("key", "create", "--tenant", "nobody"), ("nobody",)),
        (("key", "list", "--tenant", "nobody"), ("nobody",)),
        (("key", "revoke", "nokey"), ("nokey",)),
        (("tenant", "set", "nobody", "--budget", "1"), ("nobody",)),
        (("tenant", "create", "a b"), ("a b",)),
    ],
)
def test_what_is_unknown_is_named(arguments: tuple[str, ...], words: tuple[str, ...], penstock: Penstock) -> None:
    refused(penstock(*arguments), *words)


def test_wrong_values_are_told_before_anything_is_asked(penstock: Penstock) -> None:
    for arguments in (
        ("tenant", "create", "acme", "--budget", "1e-10"),
        ("tenant", "create", "acme", "--budget", "NaN"),
        ("tenant", "create", "acme", "--budget", "-1"),
        ("tenant", "create", "acme", "--requests-per-minute", "1.5"),
        ("tenant", "create", "acme", "--period", "day"),
        ("tenant", "create", "acme", "--budget", "1", "--period", "year"),
        ("tenant", "set", "acme"),
        ("usage", "--start", "2026-01-01T00:00:00"),
        ("usage", "--start", "yesterday"),
        ("usage", "--start", "2026-01-02", "--end", "2026-01-01"),
        ("usage", "--timezone", "Mars/Olympus"),
        ("usage", "--group-by", "shoe-size"),
        ("key", "create", "--tenant", "acme", "--expires", "soon"),
        ("key", "create", "--tenant", "acme", "--scope", "admin"),
    ):
        refused(penstock(*arguments))
    assert "no tenants" in ok(penstock("tenant", "list"))


def test_a_missing_database_is_told_with_the_remedy(
    penstock: Penstock, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    refused(penstock("tenant", "list"), "penstock migrate")
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:secret@127.0.0.1:{free_port()}/d")
    gone = penstock("tenant", "list")
    refused(gone, "Postgres does not answer")
    assert "secret" not in gone.stderr


def test_a_database_of_an_earlier_release_is_told_with_the_remedy(
    penstock: Penstock, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(empty_database_url, "0001")
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    refused(penstock("tenant", "list"), "penstock migrate")


def test_a_change_is_made_though_redis_is_away(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    ok(penstock("tenant", "create", "acme"))
    ok(penstock("tenant", "list"))


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        *itertools.product(["DATABASE_URL", "REDIS_URL"], ["tenant list", "serve", "up --data-dir data"]),
        ("DATABASE_URL", "migrate"),
    ],
)
def test_a_url_that_cannot_be_read_ends_in_one_line_without_its_password(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:p@127.0.0.1:1/d")
    monkeypatch.setenv("REDIS_URL", "redis://:p@127.0.0.1:1/0")
    monkeypatch.setenv(variable, "redis://:topsecret/x@127.0.0.1:1/0")
    monkeypatch.setattr("sys.argv", ["penstock", *command.split()])
    # It would bind the log of the whole test run to what this test captures.
    monkeypatch.setattr("gateway.telemetry.configure_logging", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main()
    told = capsys.readouterr().err
    assert caught.value.code
    assert told.startswith("Error: ")
    assert told.count("\n") == 1
    assert "topsecret" not in told
    assert variable in told
