from __future__ import annotations

import os
import pwd
import re
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import transaction
from gateway.tenants.audit import Actor, audit
from gateway.tenants.directory import Directory, TenantChange
from gateway.tenants.records import ConfigurationError
from tests.gateway.tenants.support import ACTOR, budget


async def test_every_change_is_written_down_with_before_and_after(directory: Directory) -> None:
    who = Actor("abcdefghij01", "admin")
    tenant = await directory.create_tenant(who, "acme", limits=[budget(5)])
    await directory.update_tenant(who, "acme", TenantChange(weight=2))
    await directory.create_project(who, "acme", "web")
    await directory.update_project(who, "acme", "web", name="site")
    _, key = await directory.create_key(who, "acme", "k")
    await directory.rotate_key(who, key.public_id, grace_s=1)
    await directory.revoke_key(who, key.public_id)
    limit = await directory.set_limit(who, "acme", budget(6))
    await directory.delete_limit(who, "acme", limit.id)
    await directory.archive_project(who, "acme", "site")
    await directory.archive_tenant(who, "acme")
    _, admin = await directory.create_admin_key(ACTOR)
    await directory.revoke_key(ACTOR, admin.public_id)
    entries = list(reversed(await directory.list_audit()))
    told = [(entry.action, entry.kind, entry.target) for entry in entries]
    assert told == [
        ("create", "tenant", "acme"),
        ("create", "project", "default"),
        ("create", "limit", str(limit.id)),
        ("update", "tenant", "acme"),
        ("create", "project", "web"),
        ("update", "project", "web"),
        ("create", "key", key.public_id),
        ("rotate", "key", key.public_id),
        ("revoke", "key", key.public_id),
        ("update", "limit", str(limit.id)),
        ("delete", "limit", str(limit.id)),
        ("archive", "project", "site"),
        ("archive", "tenant", "acme"),
        ("create", "admin_key", admin.public_id),
        ("revoke", "admin_key", admin.public_id),
    ]
    assert {entry.actor for entry in entries[:13]} == {"abcdefghij01"}
    assert {entry.tenant_id for entry in entries[:13]} == {tenant.id}
    assert entries[-1].tenant_id is None
    for entry in entries:
        assert (entry.before is None) == (entry.action == "create")
        assert (entry.after is None) == (entry.action == "delete")
        assert entry.at.tzinfo is not None
    weights = [(entry.before or {})["weight"] for entry in entries[3:4]] + [(entries[3].after or {})["weight"]]
    assert weights == [1.0, 2.0]
    assert not re.search("secret|sha256|salt", repr(entries))


async def test_it_is_read_by_tenant_kind_and_actor_in_pages(directory: Directory) -> None:
    for name in ("acme", "globex"):
        await directory.create_tenant(ACTOR, name)
        await directory.create_project(Actor("abcdefghij01"), name, "web")
    assert {entry.target for entry in await directory.list_audit(tenant="acme", kind="project")} == {"default", "web"}
    assert [entry.target for entry in await directory.list_audit(actor="abcdefghij01")] == ["web", "web"]
    every = await directory.list_audit()
    pages = []
    while page := await directory.list_audit(after=pages[-1].id if pages else None, limit=2):
        assert len(page) <= 2
        pages += page
    assert pages == every
    assert len(every) == 6
    wrong: tuple[dict[str, Any], ...] = ({"limit": 0}, {"kind": "\x00"}, {"actor": "\ud800"}, {"actor": "x" * 201})
    for given in wrong:
        with pytest.raises(ConfigurationError):
            await directory.list_audit(**given)


async def test_nothing_is_changed_or_taken_out(directory: Directory, engine: AsyncEngine) -> None:
    await directory.create_tenant(ACTOR, "acme")
    before = await directory.list_audit()
    for statement in ("UPDATE audit_log SET actor = 'nobody'", "DELETE FROM audit_log", "TRUNCATE audit_log"):
        with pytest.raises(Exception, match="append-only"):
            async with transaction(engine) as connection:
                await connection.execute(text(statement))
    assert await directory.list_audit() == before


async def test_a_change_that_fails_leaves_no_entry(engine: AsyncEngine, directory: Directory) -> None:
    async with engine.connect() as connection:
        await audit(connection, ACTOR, "create", "tenant", "acme")
        await connection.rollback()
    assert await directory.list_audit() == []


def test_the_console_names_its_user_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "somebody-else\udcff")
    assert Actor.at_console() == Actor(f"cli:{pwd.getpwuid(os.getuid()).pw_name}", "owner")
    nameless = 2**31 - 7
    monkeypatch.setattr(os, "getuid", lambda: nameless)
    assert Actor.at_console().name == f"cli:{nameless}"
    assert Actor.at_console().is_console
    assert not Actor("abcdefghij01").is_console
