"""Tenants and projects: what is created, changed and archived, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.tables import tenants
from gateway.ids import uuid7
from gateway.secret_key import SealBroken, SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.directory import Directory, TenantChange, TenantSettings
from gateway.tenants.principal import AdminRole
from gateway.tenants.records import (
    ConfigurationError,
    NotAllowed,
    ProjectExists,
    TenantExists,
    UnknownKey,
    UnknownLimit,
    UnknownProject,
    UnknownTenant,
    VersionConflict,
)
from gateway.tenants.tenant_changes import unseal_webhook_secret
from tests.gateway.db.support import ManualClock
from tests.gateway.tenants.support import ACTOR, Announcements, budget, concurrent, requests_per_minute

NOBODY = ("nobody", "", "a\x00b", "\ud800", str(uuid7()), uuid7())


async def test_every_change_raises_the_generation_and_announces_it(
    directory: Directory, announced: Announcements
) -> None:
    tenant = await directory.create_tenant(ACTOR, "acme")
    _, key = await directory.create_key(ACTOR, "acme", "k")
    limit = await directory.set_limit(ACTOR, "acme", concurrent(1))
    await directory.delete_limit(ACTOR, "acme", limit.id)
    await directory.create_project(ACTOR, "acme", "web")
    await directory.update_project(ACTOR, "acme", "web", name="site")
    await directory.archive_project(ACTOR, "acme", "site")
    await directory.rotate_key(ACTOR, key.public_id)
    await directory.revoke_key(ACTOR, key.public_id)
    changed = await directory.update_tenant(ACTOR, "acme", TenantChange(weight=2))
    archived = await directory.archive_tenant(ACTOR, "acme")
    assert announced.heard == [(tenant.id, generation) for generation in range(1, 12)]
    assert (changed.generation, archived.generation) == (10, 11)
    assert await directory.tenant("acme") == archived


async def test_what_changes_nothing_is_no_change(directory: Directory, announced: Announcements) -> None:
    await directory.create_tenant(ACTOR, "acme", limits=[budget(5)])
    _, key = await directory.create_key(ACTOR, "acme", "k")
    await directory.revoke_key(ACTOR, key.public_id)
    before = (len(announced.heard), await directory.list_audit(), await directory.tenant("acme"))
    await directory.update_tenant(ACTOR, "acme", TenantChange())
    await directory.update_tenant(ACTOR, "acme", TenantChange(weight=1, timezone="UTC"))
    await directory.set_limit(ACTOR, "acme", budget(5))
    await directory.update_project(ACTOR, "acme", "default", name="default")
    await directory.revoke_key(ACTOR, key.public_id)
    assert (len(announced.heard), await directory.list_audit(), await directory.tenant("acme")) == before


async def test_a_lost_announcement_does_not_undo_the_change(engine: AsyncEngine, clock: ManualClock) -> None:
    async def fail(tenant_id: UUID, generation: int) -> None:
        raise ConnectionError("Redis is away")

    directory = Directory(engine, clock, announce=fail)
    await directory.create_tenant(ACTOR, "acme")
    limit = await directory.set_limit(ACTOR, "acme", concurrent(1))
    assert await directory.list_limits("acme") == [limit]


async def test_a_tenant_is_found_by_name_and_id_and_can_be_renamed(directory: Directory) -> None:
    created = await directory.create_tenant(ACTOR, "acme")
    assert [await directory.tenant(ref) for ref in ("acme", created.id, str(created.id))] == [created] * 3
    renamed = await directory.update_tenant(ACTOR, created.id, TenantChange(name="acme-inc"))
    assert (renamed.name, renamed.version) == ("acme-inc", 2)
    assert await directory.tenant(created.id) == renamed
    with pytest.raises(UnknownTenant):
        await directory.tenant("acme")
    await directory.create_tenant(ACTOR, "acme")
    with pytest.raises(TenantExists):
        await directory.update_tenant(ACTOR, "acme", TenantChange(name="acme-inc"))


async def test_names_are_unique_and_plain(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    await directory.create_tenant(ACTOR, "globex")
    with pytest.raises(TenantExists):
        await directory.create_tenant(ACTOR, "acme")
    await directory.create_project(ACTOR, "acme", "web")
    await directory.create_project(ACTOR, "globex", "web")
    for taken in ("default", "web"):
        with pytest.raises(ProjectExists):
            await directory.create_project(ACTOR, "acme", taken)
    with pytest.raises(ProjectExists):
        await directory.update_project(ACTOR, "acme", "web", name="default")
    in_paths = ("a/", "a//b", "a/./b", "a/..")
    for name in ("", "-x", "a b", "a,b", "=1+1", "a\nb", "a\x00b", "é", "a" * 101, str(uuid7()), *in_paths):
        for call in (
            directory.create_tenant(ACTOR, name),
            directory.create_project(ACTOR, "acme", name),
            directory.create_key(ACTOR, "acme", name),
            directory.update_tenant(ACTOR, "acme", TenantChange(name=name)),
            directory.update_project(ACTOR, "acme", "web", name=name),
        ):
            with pytest.raises(ConfigurationError):
                await call
    assert [record.name for record in await directory.list_tenants()] == ["acme", "globex"]
    assert [record.name for record in await directory.list_projects("acme")] == ["default", "web"]


async def test_settings_that_make_no_sense_are_refused(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    values: tuple[dict[str, Any], ...] = (
        {"timezone": "Mars/Olympus"},
        {"timezone": "../../etc/passwd"},
        {"timezone": ""},
        *({"timezone": zone} for zone in ("localtime", "posixrules", "right/UTC", "posix/UTC", "Factory")),
        {"redis_loss": "shrug"},
        {"markup_bp": -10_001},
        {"markup_bp": 1_000_001},
        {"weight": 0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        *({"webhook_url": url} for url in ("", "ftp://a/b", "https://", "//a", "https://a b/", "https://a\n/", "é")),
        {"webhook_url": "https://user:password@example.com/"},
        {"webhook_url": "https://[::1"},
        {"webhook_url": "https://example.com:99999/"},
        {"webhook_url": "https://example.com/" + "x" * 2000},
    )
    for given in values:
        with pytest.raises(ConfigurationError) as caught:
            await directory.create_tenant(ACTOR, "globex", settings=TenantSettings(**given))
        assert "password@" not in str(caught.value)
        with pytest.raises(ConfigurationError):
            await directory.update_tenant(ACTOR, "acme", TenantChange(**given))
    assert (await directory.tenant("acme")).version == 1
    assert len(await directory.list_tenants()) == 1


async def test_the_secret_of_a_webhook_is_shown_once_and_sealed(
    directory: Directory, engine: AsyncEngine, secret_key: SecretKey, clock: ManualClock
) -> None:
    async def sealed(tenant_id: UUID) -> bytes | None:
        async with engine.connect() as connection:
            stored: bytes | None = await connection.scalar(
                select(tenants.c.webhook_secret).where(tenants.c.id == tenant_id)
            )
            return stored

    settings = TenantSettings(webhook_url="https://example.com/hook")
    created = await directory.create_tenant(ACTOR, "acme", settings=settings)
    assert created.webhook_secret is not None
    assert created.webhook_secret not in repr(created)
    assert (await directory.tenant("acme")).webhook_secret is None
    stored = await sealed(created.id)
    assert stored is not None
    assert created.webhook_secret.encode() not in stored
    assert unseal_webhook_secret(secret_key, created.id, stored) == created.webhook_secret
    with pytest.raises(SealBroken):
        unseal_webhook_secret(secret_key, uuid7(), stored)
    same = await directory.update_tenant(ACTOR, "acme", TenantChange(webhook_url="https://example.com/hook", weight=2))
    assert same.webhook_secret is None
    assert await sealed(created.id) == stored
    other = await directory.update_tenant(ACTOR, "acme", TenantChange(webhook_url="http://localhost:8000/"))
    assert other.webhook_secret not in (None, created.webhook_secret)
    await directory.update_tenant(ACTOR, "acme", TenantChange(webhook_url="http://localhost:8000/elsewhere"))
    entry = (await directory.list_audit(limit=1))[0]
    assert entry.before is not None
    assert entry.after is not None
    assert entry.before["webhook_url"] != entry.after["webhook_url"]
    await directory.update_tenant(ACTOR, "acme", TenantChange(webhook_url=None))
    assert await sealed(created.id) is None
    audited = repr(await directory.list_audit())
    assert "https://example.com/..." in audited
    for hidden in ("whsec_", "/hook", "elsewhere"):
        assert hidden not in audited
    with pytest.raises(ConfigurationError, match="PENSTOCK_SECRET_KEY"):
        await Directory(engine, clock).create_tenant(ACTOR, "globex", settings=settings)


async def test_settings_and_limits_change_together_or_not_at_all(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme", limits=[requests_per_minute(1), budget(1)])
    old = {limit.metric: limit for limit in await directory.list_limits("acme")}
    change = TenantChange(timezone="Europe/Berlin")
    for limits, lifted in (([concurrent(-1)], [old["budget"].id]), ([concurrent(1)], [uuid7()])):
        with pytest.raises((ConfigurationError, UnknownLimit)):
            await directory.update_tenant(ACTOR, "acme", change, limits=limits, lifted=lifted)
    assert (await directory.tenant("acme")).generation == 1
    record = await directory.update_tenant(
        ACTOR, "acme", change, limits=[concurrent(1), requests_per_minute(9)], lifted=[old["budget"].id]
    )
    assert (record.timezone, record.generation) == ("Europe/Berlin", 2)
    amounts = {limit.metric: limit.amount for limit in await directory.list_limits("acme")}
    assert amounts == {"concurrent": 1, "requests": 9}


async def test_of_two_changes_of_one_version_one_is_refused(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    version = (await directory.tenant("acme")).version

    async def change(weight: float) -> bool:
        try:
            await directory.update_tenant(ACTOR, "acme", TenantChange(weight=weight), if_version=version)
        except VersionConflict:
            return False
        return True

    assert sum(await asyncio.gather(*(change(weight) for weight in (2, 3, 4)))) == 1
    project = await directory.project("acme", "default")
    limit = await directory.set_limit(ACTOR, "acme", budget(1))
    _, key = await directory.create_key(ACTOR, "acme", "k")
    for call in (
        directory.archive_tenant(ACTOR, "acme", if_version=version),
        directory.update_project(ACTOR, "acme", "default", name="x", if_version=project.version + 1),
        directory.archive_project(ACTOR, "acme", "default", if_version=project.version + 1),
        directory.set_limit(ACTOR, "acme", budget(2), if_version=limit.version + 1),
        directory.set_limit(ACTOR, "acme", concurrent(2), if_version=1),
        directory.delete_limit(ACTOR, "acme", limit.id, if_version=limit.version + 1),
    ):
        with pytest.raises(VersionConflict, match="read it again"):
            await call
    assert await directory.key(key.public_id) == key


async def test_archived_tenants_and_projects_stay_as_they_are(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    await directory.create_project(ACTOR, "acme", "web")
    _, key = await directory.create_key(ACTOR, "acme", "k", project="web")
    project = await directory.archive_project(ACTOR, "acme", "web")
    assert project.archived_at is not None
    assert [record.name for record in await directory.list_projects("acme")] == ["default"]
    assert len(await directory.list_projects("acme", archived=True)) == 2
    for call in (
        directory.create_key(ACTOR, "acme", "k", project="web"),
        directory.update_project(ACTOR, "acme", "web", name="x"),
        directory.archive_project(ACTOR, "acme", "web"),
    ):
        with pytest.raises(ConfigurationError, match="archived"):
            await call
    tenant = await directory.archive_tenant(ACTOR, "acme")
    assert tenant.archived_at is not None
    assert await directory.list_tenants() == []
    assert await directory.list_tenants(archived=True) == [tenant]
    for later in (
        directory.update_tenant(ACTOR, "acme", TenantChange(weight=2)),
        directory.archive_tenant(ACTOR, "acme"),
        directory.create_project(ACTOR, "acme", "new"),
        directory.create_key(ACTOR, "acme", "k"),
        directory.rotate_key(ACTOR, key.public_id),
        directory.set_limit(ACTOR, "acme", concurrent(1)),
    ):
        with pytest.raises(ConfigurationError, match="archived"):
            await later
    with pytest.raises(TenantExists):
        await directory.create_tenant(ACTOR, "acme")


async def test_lists_come_in_pages(directory: Directory) -> None:
    for name in "edcba":
        await directory.create_tenant(ACTOR, name)
    pages = [await directory.list_tenants(limit=2), await directory.list_tenants(after="b", limit=2)]
    assert [[record.name for record in page] for page in pages] == [["a", "b"], ["c", "d"]]
    assert [record.name for record in await directory.list_tenants(after="d", limit=2)] == ["e"]
    for limit in (0, -1, 1001):
        with pytest.raises(ConfigurationError):
            await directory.list_tenants(limit=limit)
    for odd in ("\x00", "\ud800", ""):
        for call in (
            directory.list_tenants(after=odd),
            directory.list_projects("a", after=odd),
            directory.list_keys(after=odd),
            directory.list_admin_keys(after=odd),
        ):
            with pytest.raises(ConfigurationError):
                await call


async def test_what_is_unknown_is_named(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    for ref in NOBODY:
        for call in (
            directory.tenant(ref),
            directory.update_tenant(ACTOR, ref, TenantChange(weight=2)),
            directory.create_project(ACTOR, ref, "x"),
            directory.list_projects(ref),
            directory.create_key(ACTOR, ref, "k"),
            directory.list_keys(ref),
            directory.set_limit(ACTOR, ref, concurrent(1)),
            directory.list_limits(ref),
            directory.list_audit(tenant=ref),
        ):
            with pytest.raises(UnknownTenant):
                await call
        with pytest.raises(UnknownProject):
            await directory.project("acme", ref)
        with pytest.raises(UnknownProject):
            await directory.create_key(ACTOR, "acme", "k", project=ref)
        with pytest.raises(UnknownLimit):
            await directory.limit("acme", ref)
        with pytest.raises(UnknownKey):
            await directory.revoke_key(ACTOR, str(ref))


async def test_another_tenants_ids_are_unknown(directory: Directory) -> None:
    for name in ("acme", "globex"):
        await directory.create_tenant(ACTOR, name)
    web = await directory.create_project(ACTOR, "globex", "web")
    limit = await directory.set_limit(ACTOR, "globex", concurrent(1))
    _, key = await directory.create_key(ACTOR, "globex", "k")
    _, admin = await directory.create_admin_key(ACTOR)
    for call in (
        directory.project("acme", web.id),
        directory.update_project(ACTOR, "acme", web.id, name="x"),
        directory.archive_project(ACTOR, "acme", web.id),
        directory.create_key(ACTOR, "acme", "k", project=web.id),
        directory.list_keys("acme", web.id),
    ):
        with pytest.raises(UnknownProject):
            await call
    for of_limit in (
        directory.limit("acme", limit.id),
        directory.delete_limit(ACTOR, "acme", limit.id),
        directory.update_tenant(ACTOR, "acme", TenantChange(), lifted=[limit.id]),
    ):
        with pytest.raises(UnknownLimit):
            await of_limit
    for public_id in (key.public_id, admin.public_id):
        for of_key in (
            directory.key(public_id, "acme"),
            directory.rotate_key(ACTOR, public_id, tenant="acme"),
            directory.revoke_key(ACTOR, public_id, tenant="acme"),
        ):
            with pytest.raises(UnknownKey):
                await of_key
    assert await directory.key(key.public_id, "globex") == key


@pytest.mark.parametrize(("role", "may_change", "may_manage"), [("owner", 1, 1), ("admin", 1, 0), ("viewer", 0, 0)])
async def test_roles(directory: Directory, role: AdminRole, may_change: bool, may_manage: bool) -> None:
    await directory.create_tenant(ACTOR, "acme")
    _, key = await directory.create_key(ACTOR, "acme", "k")
    _, admin = await directory.create_admin_key(ACTOR)
    _, own = await directory.create_admin_key(ACTOR, role=role)
    who = Actor(own.public_id, role)
    changes = (
        directory.create_tenant(who, "globex"),
        directory.update_tenant(who, "acme", TenantChange(weight=2)),
        directory.create_project(who, "acme", "web"),
        directory.update_project(who, "acme", "default", name="x"),
        directory.create_key(who, "acme", "k", project="web" if may_change else "default"),
        directory.rotate_key(who, key.public_id),
        directory.revoke_key(who, key.public_id),
        directory.set_limit(who, "acme", concurrent(1)),
        directory.archive_project(who, "acme", "x"),
        directory.archive_tenant(who, "acme"),
    )
    managing = (
        directory.create_admin_key(who),
        directory.rotate_key(who, admin.public_id),
        directory.revoke_key(who, admin.public_id),
    )
    for calls, allowed in ((changes, may_change), (managing, may_manage)):
        for call in calls:
            if allowed:
                await call
            else:
                with pytest.raises(NotAllowed):
                    await call
