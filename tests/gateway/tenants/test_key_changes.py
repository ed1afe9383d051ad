from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.tables import api_keys
from gateway.tenants.audit import Actor
from gateway.tenants.directory import Directory, KeyChange
from gateway.tenants.keys import parse_key
from gateway.tenants.records import ConfigurationError, LastOwner, NotAllowed, VersionConflict
from gateway.tenants.service import Tenants
from tests.gateway.db.support import ManualClock
from tests.gateway.tenants.support import ACTOR


async def test_only_hashes_are_stored(directory: Directory, engine: AsyncEngine) -> None:
    await directory.create_tenant(ACTOR, "acme")
    first, record = await directory.create_key(ACTOR, "acme", "k")
    second, rotated = await directory.rotate_key(ACTOR, record.public_id, grace_s=10)
    async with engine.connect() as connection:
        stored = repr((await connection.execute(select(api_keys))).all())
    audited = repr(await directory.list_audit())
    assert record.public_id in stored
    for text in (first, second):
        parsed = parse_key(text)
        assert parsed
        assert parsed[0] == record.public_id
        for place in (stored, audited, repr(record), repr(rotated)):
            assert parsed[1] not in place
    assert "sha256" not in audited


async def test_keys_of_no_use_are_not_issued(directory: Directory, clock: ManualClock) -> None:
    await directory.create_tenant(ACTOR, "acme")
    _, record = await directory.create_key(ACTOR, "acme", "k")
    naive = datetime(2027, 1, 1)  # noqa: DTZ001 - what is refused
    far = datetime.max.replace(tzinfo=UTC)
    wrong: tuple[dict[str, Any], ...] = (
        *({"scopes": frozenset(scopes)} for scopes in (set(), {"admin"}, {"inference", "nonsense"})),
        *({"expires_at": moment} for moment in (clock.now(), clock.now() - timedelta(days=1), naive, far)),
        {"allowed_models": frozenset({"a b"})},
        {"max_context_tokens": 0},
        {"max_output_tokens": -1},
        {"max_output_tokens": 10**9},
    )
    for values in wrong:
        with pytest.raises(ConfigurationError):
            await directory.create_key(ACTOR, "acme", "k", **values)
        with pytest.raises(ConfigurationError):
            await directory.update_key(ACTOR, record.public_id, KeyChange(**values))
    assert await directory.list_keys("acme") == [record]


async def test_a_key_is_changed_as_told_and_no_more(directory: Directory, service: Tenants, clock: ManualClock) -> None:
    await directory.create_tenant(ACTOR, "acme")
    text, before = await directory.create_key(ACTOR, "acme", "k", max_output_tokens=5, allowed_models={"m"})
    soon = clock.now() + timedelta(days=1)
    change = KeyChange(name="new", scopes=frozenset({"usage:read"}), max_output_tokens=None, expires_at=soon)
    after = await directory.update_key(ACTOR, before.public_id, change, if_version=before.version)
    assert (after.name, after.scopes, after.max_output_tokens) == ("new", {"usage:read"}, None)
    assert (after.allowed_models, after.expires_at, after.version) == ({"m"}, soon, 2)
    principal = await service.authenticate(text)
    assert (principal.scopes, principal.max_output_tokens) == ({"usage:read"}, None)
    with pytest.raises(VersionConflict):
        await directory.update_key(ACTOR, before.public_id, KeyChange(name="x"), if_version=before.version)
    lifted = await directory.update_key(ACTOR, before.public_id, KeyChange(allowed_models=None, expires_at=None))
    assert (lifted.allowed_models, lifted.expires_at) == (None, None)


async def test_a_revoked_key_stays_so(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    _, record = await directory.create_key(ACTOR, "acme", "k")
    first = await directory.revoke_key(ACTOR, record.public_id)
    assert first.revoked_at is not None
    assert await directory.revoke_key(ACTOR, record.public_id) == first
    for call in (
        directory.rotate_key(ACTOR, record.public_id),
        directory.update_key(ACTOR, record.public_id, KeyChange(name="x")),
    ):
        with pytest.raises(ConfigurationError, match="revoked"):
            await call
    assert await directory.list_keys("acme") == [first]


async def test_keys_are_listed_oldest_first_by_tenant_and_project_in_pages(directory: Directory) -> None:
    made = []
    for name in ("acme", "globex"):
        await directory.create_tenant(ACTOR, name)
        await directory.create_project(ACTOR, name, "web")
        for project in ("default", "web", "web"):
            made.append((await directory.create_key(ACTOR, name, "k", project=project))[1])
    await directory.create_admin_key(ACTOR)
    assert await directory.list_keys() == made
    assert await directory.list_keys("acme") == made[:3]
    assert await directory.list_keys("globex", "web") == made[4:]
    assert [(key.tenant_name, key.project_name) for key in made[2:4]] == [("acme", "web"), ("globex", "default")]
    assert await directory.list_keys(limit=2, after=made[2].public_id) == made[3:5]
    assert await directory.list_keys("acme", after=made[2].public_id) == []
    with pytest.raises(ConfigurationError):
        await directory.list_keys(project="web")


async def test_grace_is_bounded(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    _, record = await directory.create_key(ACTOR, "acme", "k")
    for grace_s in (-1, float("nan"), 31 * 86400):
        with pytest.raises(ConfigurationError, match="grace"):
            await directory.rotate_key(ACTOR, record.public_id, grace_s=grace_s)


async def test_the_last_owner_can_only_be_ended_at_the_console(directory: Directory, clock: ManualClock) -> None:
    _, first = await directory.create_admin_key(ACTOR)
    chief = Actor(first.public_id, "owner")
    _, second = await directory.create_admin_key(ACTOR, expires_at=clock.now() + timedelta(hours=1))
    for role in ("admin", "viewer"):
        await directory.create_admin_key(ACTOR, role=role)  # type: ignore[arg-type]
    clock.advance(3600)  # the second is none any more
    with pytest.raises(LastOwner, match="penstock admin-key"):
        await directory.revoke_key(chief, first.public_id)
    soon, later = (KeyChange(expires_at=clock.now() + timedelta(seconds=seconds)) for seconds in (3600, 7200))
    with pytest.raises(LastOwner):
        await directory.update_key(chief, first.public_id, soon)
    for actor, change in ((chief, KeyChange(name="chief")), (ACTOR, soon), (chief, later)):
        await directory.update_key(actor, first.public_id, change)
    _, third = await directory.create_admin_key(chief)
    both = (first.public_id, third.public_id)
    # Each revokes itself.
    outcomes = await asyncio.gather(
        *(directory.revoke_key(Actor(id_, "owner"), id_) for id_ in both), return_exceptions=True
    )
    assert sorted(isinstance(outcome, LastOwner) for outcome in outcomes) == [False, True]
    for public_id in both:
        assert (await directory.revoke_key(ACTOR, public_id)).revoked_at is not None
    assert second.public_id in {key.public_id for key in await directory.list_admin_keys()}


async def test_an_owner_who_was_ended_makes_no_successor(
    directory: Directory, engine: AsyncEngine, clock: ManualClock
) -> None:
    _, last = await directory.create_admin_key(ACTOR)
    _, revoked = await directory.create_admin_key(ACTOR)
    _, expired = await directory.create_admin_key(ACTOR, expires_at=clock.now() + timedelta(seconds=1))
    _, admin = await directory.create_admin_key(ACTOR, role="admin")
    await directory.revoke_key(ACTOR, revoked.public_id)
    clock.advance(1)
    # Another gateway takes their keys for good until its cache is a few seconds older.
    for key in (revoked, expired, admin):
        who = Actor(key.public_id, "owner")
        for attempt in (
            directory.create_admin_key(who),
            directory.rotate_key(who, admin.public_id),
            directory.revoke_key(who, last.public_id),
        ):
            with pytest.raises(NotAllowed):
                await attempt
    # Two who revoke each other at once: the slower one is none any more.
    _, other = await directory.create_admin_key(ACTOR)
    pair = (last.public_id, other.public_id)
    outcomes = await asyncio.gather(
        *(directory.revoke_key(Actor(one, "owner"), two) for one, two in (pair, pair[::-1])), return_exceptions=True
    )
    assert sorted(isinstance(outcome, NotAllowed) for outcome in outcomes) == [False, True]


async def test_administrators_keys_are_their_own_kind(directory: Directory, clock: ManualClock) -> None:
    _, record = await directory.create_admin_key(ACTOR, "ops", role="admin")
    assert (record.role, record.scopes, record.tenant_id) == ("admin", {"admin"}, None)
    renamed = await directory.update_key(
        ACTOR, record.public_id, KeyChange(name="new", expires_at=clock.now() + timedelta(days=1))
    )
    assert renamed.name == "new"
    for change in (KeyChange(scopes=frozenset({"inference"})), KeyChange(max_output_tokens=5)):
        with pytest.raises(ConfigurationError, match="administrator"):
            await directory.update_key(ACTOR, record.public_id, change)
    with pytest.raises(ConfigurationError, match="role"):
        await directory.create_admin_key(ACTOR, role="king")  # type: ignore[arg-type]
    assert await directory.list_admin_keys() == [renamed]
    assert await directory.list_keys() == []
