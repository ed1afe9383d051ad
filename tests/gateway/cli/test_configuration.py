"""Tenants, projects, limits, keys and the audit log on the command line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.clock import SystemClock
from gateway.tenants.audit import Actor
from gateway.tenants.keys import parse_key
from gateway.tenants.principal import Principal
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import AdminPrincipal, Tenants
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened
from tests.gateway.tenants.support import shape


class Caller:
    """What a gateway makes of a key."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url

    def principal(self, key: str) -> Principal:
        async def work() -> Principal:
            async with opened(self._database_url) as engine:
                return await Tenants(engine, SystemClock()).authenticate(key)

        return asyncio.run(work())

    def admin(self, key: str) -> AdminPrincipal:
        async def work() -> AdminPrincipal:
            async with opened(self._database_url) as engine:
                return await Tenants(engine, SystemClock()).authenticate_admin(key)

        return asyncio.run(work())


@pytest.fixture
def caller(database_url: str) -> Caller:
    return Caller(database_url)


@pytest.fixture
def acme(penstock: Penstock) -> None:
    ok(penstock("tenant", "create", "acme"))


def id_of(key: str) -> str:
    parsed = parse_key(key)
    assert parsed
    return parsed[0]


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()[1:]]


def issue(penstock: Penstock, *arguments: str) -> str:
    return ok(penstock("key", "create", "--tenant", "acme", *arguments)).strip()


def test_settings_of_a_tenant(penstock: Penstock, caller: Caller) -> None:
    options = "--markup 12.5 --redis-loss fail_open --weight 2.5 --tokens-per-minute 9000 --timezone Asia/Kathmandu"
    created = penstock("tenant", "create", "acme", *options.split(), "--webhook-url", "https://example.com/hook")
    assert "whsec_" in created.stderr
    assert "whsec_" not in ok(created)
    principal = caller.principal(issue(penstock))
    assert (principal.markup_bp, principal.redis_loss, principal.weight) == (1250, "fail_open", 2.5)
    assert principal.timezone == "Asia/Kathmandu"
    assert shape(principal.tenant_limits) == {("tenant", "", "tokens", "minute", 9000)}
    changed = penstock("tenant", "set", "acme", "--webhook-url", "none", "--markup", "-5%")
    assert "whsec_" not in ok(changed) + changed.stderr
    assert "-5%" in changed.stdout


def test_the_one_budget_of_a_tenant_is_changed_and_several_by_their_ids(penstock: Penstock, caller: Caller) -> None:
    ok(penstock("tenant", "create", "acme", "--budget", "1"))
    ok(penstock("tenant", "set", "acme", "--period", "day"))
    key = issue(penstock)
    assert shape(caller.principal(key).tenant_limits) == {("tenant", "", "budget", "day", 10**9)}
    ok(penstock("tenant", "set", "acme", "--budget", "2", "--period", "week"))
    assert shape(caller.principal(key).tenant_limits) == {("tenant", "", "budget", "week", 2 * 10**9)}
    ok(
        penstock(
            "limit", "set", "--tenant", "acme", "--budget-per-week", "3", "--threshold", "80", "--threshold", "100"
        )
    )
    ok(penstock("tenant", "set", "acme", "--budget", "4"))
    (limit,) = caller.principal(key).tenant_limits
    assert (limit.amount, limit.thresholds) == (4 * 10**9, (80, 100))
    ok(penstock("limit", "set", "--tenant", "acme", "--budget-total", "9"))
    refused(penstock("tenant", "set", "acme", "--budget", "5"), "penstock limit")
    assert len(caller.principal(key).tenant_limits) == 2


def test_tenants_are_renamed_and_archived(penstock: Penstock, caller: Caller, acme: None) -> None:
    key = issue(penstock)
    ok(penstock("tenant", "rename", "acme", "acme-inc"))
    assert caller.principal(key).tenant_name == "acme-inc"
    assert penstock("tenant", "archive", "acme-inc").exit_code != 0  # nobody confirmed it
    assert caller.principal(key)
    ok(penstock("tenant", "archive", "acme-inc", "--yes"))
    with pytest.raises(InvalidKey):
        caller.principal(key)
    assert "no tenants" in ok(penstock("tenant", "list"))
    assert "acme-inc" in ok(penstock("tenant", "list", "--archived"))


def test_projects(penstock: Penstock, caller: Caller, acme: None) -> None:
    ok(penstock("project", "create", "--tenant", "acme", "web"))
    refused(penstock("project", "create", "--tenant", "acme", "web"), "web", "already")
    refused(penstock("key", "create", "--tenant", "acme", "--project", "site"), "penstock project list --tenant acme")
    key = issue(penstock, "--project", "web")
    ok(penstock("project", "rename", "--tenant", "acme", "web", "site"))
    assert caller.principal(key).project_name == "site"
    assert [row[0] for row in cells(ok(penstock("project", "list", "--tenant", "acme")))] == ["default", "site"]
    assert len(cells(ok(penstock("key", "list", "--tenant", "acme", "--project", "site")))) == 1
    ok(penstock("project", "archive", "--tenant", "acme", "site", "--yes"))
    with pytest.raises(InvalidKey):
        caller.principal(key)


def test_limits_of_every_kind(penstock: Penstock, caller: Caller, acme: None) -> None:
    ok(penstock("pool", "set", "p"))
    ok(penstock("route", "set", "m", "--pool", "p", "--context-length", "100"))
    ok(penstock("project", "create", "--tenant", "acme", "web"))
    key = issue(penstock, "--project", "web")

    def limit(*arguments: str) -> str:
        return ok(penstock("limit", "set", "--tenant", "acme", *arguments))

    assert cells(limit("--project", "web", "--tokens-per-day", "1000000"))[0][1:] == (
        ["project", "web", "tokens", "day", "1000000", "hard", "-"]
    )
    limit("--requests-per-minute", "0", "--requests-per-hour", "5", "--concurrent", "3")
    limit("--key", id_of(key), "--budget-per-month", "0.50", "--soft", "--threshold", "100", "--threshold", "80")
    limit("--model", "m", "--requests-per-day", "7")
    limit("--each-end-user", "--tokens-per-hour", "9")
    limit("--end-user", "alice", "--budget-total", "1")
    found = caller.principal(key)
    limits = shape(found.tenant_limits)
    assert limits >= {
        ("project", str(found.project_id), "tokens", "day", 1000000),
        ("tenant", "", "requests", "minute", 0),
        ("tenant", "", "requests", "hour", 5),
        ("tenant", "", "concurrent", None, 3),
        ("key", id_of(key), "budget", "month", 500_000_000),
        ("model", "m", "requests", "day", 7),
        ("end_user", "", "tokens", "hour", 9),
    }
    assert len(limits) == 8
    assert "alice" not in repr(limits)
    listed = cells(ok(penstock("limit", "list", "--tenant", "acme")))
    (soft,) = (row for row in listed if "soft" in row)
    assert soft[1:] == ["key", id_of(key), "budget", "month", "0.500000000", "soft", "80%", "100%"]
    for row in listed:
        ok(penstock("limit", "delete", "--tenant", "acme", row[0]))
    assert caller.principal(key).tenant_limits == ()
    assert "no limits" in ok(penstock("limit", "list", "--tenant", "acme"))


def test_what_cannot_be_is_told(penstock: Penstock, acme: None) -> None:
    for arguments, word in (
        ("limit set --tenant acme", "at least one amount"),
        ("limit set --tenant acme --project web --key k --concurrent 1", "one subject"),
        ("limit set --tenant acme --end-user a --each-end-user --concurrent 1", "one subject"),
        ("limit set --tenant acme --concurrent 1 --threshold 80", "--threshold"),
        ("limit set --tenant acme --budget-total 1 --threshold 0", "--threshold"),
        ("limit set --tenant acme --budget-total unlimited", "limit delete"),
        ("limit set --tenant acme --concurrent 1.5", "whole number"),
        ("limit set --tenant acme --model nope --concurrent 1", "penstock route list"),
        ("limit set --tenant acme --project nope --concurrent 1", "penstock project list"),
        ("limit delete --tenant acme nope", "penstock limit list"),
        ("tenant set acme --markup much", "percentage"),
        ("tenant set acme --weight 0", "weight"),
        ("tenant set acme --period day", "--budget"),
        ("tenant set acme --webhook-url ftp://x", "https://"),
        ("tenant create globex --period day", "--budget"),
        ("key rotate abcdefghij01 --grace soon", "90s"),
        ("key set abcdefghij01", "at least one"),
        ("key set abcdefghij01 --name x", "abcdefghij01"),
        ("admin-key create --role king", "owner"),
        ("audit --limit 0", "--limit"),
        ("audit --tenant nobody", "nobody"),
    ):
        refused(penstock(*arguments.split()), word)


def test_limits_given_together_are_set_together_or_not_at_all(penstock: Penstock, acme: None) -> None:
    amounts = "--requests-per-minute 5 --budget-per-month 10000000"
    refused(penstock("limit", "set", "--tenant", "acme", *amounts.split()), "9,000,000")
    assert "no limits" in ok(penstock("limit", "list", "--tenant", "acme"))


def test_keys_are_changed_and_rotated(penstock: Penstock, caller: Caller, acme: None) -> None:
    key = issue(penstock, "--max-context", "100", "--max-output", "10", "--model", "m")
    principal = caller.principal(key)
    assert (principal.max_context_tokens, principal.max_output_tokens) == (100, 10)
    change = "--max-context unlimited --max-output 20 --model all --scope usage:read --name new --expires never"
    ok(penstock("key", "set", id_of(key), *change.split()))
    principal = caller.principal(key)
    assert (principal.max_context_tokens, principal.max_output_tokens) == (None, 20)
    assert (principal.allowed_models, principal.scopes) == (None, {"usage:read"})
    rotated = penstock("key", "rotate", id_of(key), "--grace", "1h")
    assert "good until" in rotated.stderr
    second = ok(rotated).strip()
    assert id_of(second) == id_of(key)
    assert second != key
    for text in (key, second):
        assert caller.principal(text).key_id == id_of(key)
    third = ok(penstock("key", "rotate", id_of(key))).strip()
    for text in (key, second):
        with pytest.raises(InvalidKey):
            caller.principal(text)
    assert caller.principal(third)
    # Alike in both commands: not the name of a model.
    assert caller.principal(issue(penstock, "--model", "all")).allowed_models is None


def test_administrators_keys_have_roles(penstock: Penstock, caller: Caller) -> None:
    assert "no administrators' keys" in ok(penstock("admin-key", "list"))
    owner = ok(penstock("admin-key", "create", "--name", "root")).strip()
    viewer = ok(penstock("admin-key", "create", "--role", "viewer")).strip()
    assert [caller.admin(key).role for key in (owner, viewer)] == ["owner", "viewer"]
    assert [row[:3] for row in cells(ok(penstock("admin-key", "list")))] == [
        [id_of(owner), "root", "owner"],
        [id_of(viewer), "admin", "viewer"],
    ]
    renewed = ok(penstock("admin-key", "rotate", id_of(viewer))).strip()
    assert caller.admin(renewed).role == "viewer"
    ok(penstock("admin-key", "revoke", id_of(owner)))  # the last one: the console may
    with pytest.raises(InvalidKey):
        caller.admin(owner)


def test_the_audit_log(penstock: Penstock, acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "at_console", lambda: Actor("cli:ops"))
    key = issue(penstock)
    ok(penstock("limit", "set", "--tenant", "acme", "--budget-per-day", "1"))
    ok(penstock("limit", "set", "--tenant", "acme", "--budget-per-day", "2", "--threshold", "90"))
    ok(penstock("key", "revoke", id_of(key)))
    rows = ok(penstock("audit", "--tenant", "acme", "--actor", "cli:ops")).splitlines()[1:]
    assert [row.split()[2:4] for row in rows] == [
        ["revoke", "key"],
        ["update", "limit"],
        ["create", "limit"],
        ["create", "key"],
    ]
    assert "amount: 1000000000 -> 2000000000, thresholds: [] -> [90]" in rows[1]
    entries: list[dict[str, Any]] = [
        json.loads(line) for line in ok(penstock("audit", "--json", "--limit", "1", "--kind", "limit")).splitlines()
    ]
    assert [entry["after"]["amount"] for entry in entries] == [2 * 10**9]
    assert "secret" not in json.dumps(entries)
