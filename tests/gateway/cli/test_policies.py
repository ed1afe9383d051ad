from __future__ import annotations

from tests.gateway.cli.conftest import Penstock, ok, refused


def test_policies_are_set_one_setting_at_a_time(penstock: Penstock) -> None:
    ok(penstock("tenant", "create", "acme", "--cache", "mode=semantic", "--cache", "ttl_s=60"))
    row = ok(penstock("tenant", "list")).splitlines()[1].split()
    assert "semantic" in row
    ok(penstock("tenant", "set", "acme", "--cache", "mode=exact", "--prompt-log", "level=redacted"))
    row = ok(penstock("tenant", "list")).splitlines()[1].split()
    assert {"exact", "redacted"} <= set(row)
    ok(penstock("tenant", "set", "acme", "--cache", "mode=default"))
    row = ok(penstock("tenant", "list")).splitlines()[1].split()
    assert {"off", "redacted"} <= set(row)

    shown = ok(
        penstock("project", "set", "default", "--tenant", "acme", "--cache", "threshold=0", "--cache", "shadow=true")
    )
    assert shown == "Project default, answer cache: threshold=0.0 shadow=true\n"
    ok(penstock("pool", "set", "p"))
    ok(penstock("route", "set", "m", "--pool", "p", "--context-length", "100", "--cache", "mode=off"))
    ok(penstock("route", "set", "m", "--cache", "ttl_s=7"))
    assert "off" in ok(penstock("route", "list")).splitlines()[1].split()


def test_what_cannot_be_set_says_what_can(penstock: Penstock) -> None:
    ok(penstock("tenant", "create", "acme"))
    refused(penstock("tenant", "set", "acme", "--cache", "moed=exact"), "mode", "ttl_s")
    refused(penstock("tenant", "set", "acme", "--cache", "mode=exakt"), "mode")
    refused(penstock("tenant", "set", "acme", "--prompt-log", "retention_days=0"), "retention_days")
