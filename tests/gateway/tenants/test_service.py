from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import DatabaseUnavailable
from gateway.db.tables import api_keys, routes, tenants
from gateway.db.tables import pools as pools_table
from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory, KeyChange, LimitSpec, TenantChange, TenantSettings
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.key_cache import MAX_AWAY_S
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import AdminPrincipal, Tenants
from tests.gateway.db.support import ManualClock, opened
from tests.gateway.tenants.support import ACTOR, budget, concurrent, requests_per_minute, shape
from tests.ports import free_port

WELL_FORMED = "sk-penstock-abcdefghij01-" + "s" * 43


async def test_a_key_gives_the_tenants_principal(directory: Directory, service: Tenants) -> None:
    changed = TenantSettings(timezone="Europe/Berlin", redis_loss="fail_open", markup_bp=1250, weight=2.5)
    tenant = await directory.create_tenant(ACTOR, "acme", settings=changed)
    project = await directory.create_project(ACTOR, "acme", "web")
    text_, record = await directory.create_key(
        ACTOR,
        "acme",
        "ci",
        project="web",
        scopes={"inference", "usage:read"},
        allowed_models=["m", "n"],
        max_context_tokens=8000,
        max_output_tokens=500,
    )
    principal = await service.authenticate(text_)
    assert (principal.tenant_id, principal.tenant_name, principal.key_id) == (tenant.id, "acme", record.public_id)
    assert (principal.project_id, principal.project_name) == (project.id, "web")
    assert principal.scopes == {"inference", "usage:read"}
    assert principal.allowed_models == {"m", "n"}
    assert (principal.max_context_tokens, principal.max_output_tokens) == (8000, 500)
    assert (principal.timezone, principal.redis_loss) == ("Europe/Berlin", "fail_open")
    assert (principal.markup_bp, principal.weight) == (1250, 2.5)
    assert principal.generation == 3


async def test_no_limits_and_every_model_by_default(directory: Directory, service: Tenants) -> None:
    await directory.create_tenant(ACTOR, "acme")
    principal = await service.authenticate((await directory.create_key(ACTOR, "acme", "k"))[0])
    assert principal.tenant_limits == ()
    assert principal.scopes == {"inference"}
    assert principal.allowed_models is None
    assert principal.project_name == "default"
    assert (principal.max_context_tokens, principal.max_output_tokens) == (None, None)


async def test_a_principal_bears_the_limits_that_may_bear_on_its_requests(
    directory: Directory, service: Tenants, engine: AsyncEngine, secret_key: SecretKey
) -> None:
    async with engine.begin() as connection:
        await connection.execute(insert(pools_table).values(name="p"))
        route = {"name": "m", "pool": "p", "backend_model": "m", "context_length": 9, "timeout_s": 1.0}
        await connection.execute(insert(routes).values(route | {"default_output_tokens": 1, "max_output_tokens": 1}))
    acme = await directory.create_tenant(ACTOR, "acme", limits=[requests_per_minute(0), concurrent(4)])
    await directory.create_tenant(ACTOR, "globex", limits=[concurrent(5)])
    web = await directory.create_project(ACTOR, "acme", "web")
    key, mine = await directory.create_key(ACTOR, "acme", "k", project="web")
    _, other = await directory.create_key(ACTOR, "acme", "k")
    for subject, target in (
        ("project", "web"),
        ("project", "default"),
        ("key", mine.public_id),
        ("key", other.public_id),
        ("model", "m"),
        ("end_user", ""),
        ("end_user", "alice"),
    ):
        spec = LimitSpec(subject=subject, target=target, metric="tokens", window="day", amount=7)  # type: ignore[arg-type]
        await directory.set_limit(ACTOR, "acme", spec)
    warn = LimitSpec(metric="budget", window="month", amount=2**53 - 1, hard=False, thresholds=(100, 80, 80))
    await directory.set_limit(ACTOR, "acme", warn)
    limits = (await service.authenticate(key)).tenant_limits
    assert shape(limits) == {
        ("tenant", "", "requests", "minute", 0),
        ("tenant", "", "concurrent", None, 4),
        ("tenant", "", "budget", "month", 2**53 - 1),
        ("project", str(web.id), "tokens", "day", 7),
        ("key", mine.public_id, "tokens", "day", 7),
        ("model", "m", "tokens", "day", 7),
        ("end_user", "", "tokens", "day", 7),
        ("end_user", end_user_hash(secret_key, acme.id, "alice"), "tokens", "day", 7),
    }
    (soft,) = (limit for limit in limits if not limit.hard)
    assert soft.thresholds == (80, 100)
    assert {limit.id for limit in limits} <= {limit.id for limit in await directory.list_limits("acme")}


async def test_one_query_tells_all_about_a_key(directory: Directory, service: Tenants, engine: AsyncEngine) -> None:
    await directory.create_tenant(ACTOR, "acme", limits=[requests_per_minute(1), budget(1), concurrent(1)])
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    statements: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    assert len((await service.authenticate(key)).tenant_limits) == 3
    assert len(statements) == 1


async def test_salts_differ_between_tenants_and_stay(directory: Directory, service: Tenants) -> None:
    salts = []
    for name in ("acme", "globex"):
        await directory.create_tenant(ACTOR, name)
        first, second = [(await directory.create_key(ACTOR, name, "k"))[0] for _ in range(2)]
        assert (await service.authenticate(first)).salt == (await service.authenticate(second)).salt
        salts.append((await service.authenticate(first)).salt)
    assert salts[0] != salts[1]


async def test_keys_that_are_not_valid_look_alike(
    directory: Directory, service: Tenants, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "gone"):
        await directory.create_tenant(ACTOR, name)
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    revoked, record = await directory.create_key(ACTOR, "acme", "k")
    await directory.revoke_key(ACTOR, record.public_id)
    expired, _ = await directory.create_key(ACTOR, "acme", "k", expires_at=clock.now() + timedelta(hours=1))
    await service.authenticate(expired)
    unused, _ = await directory.create_key(ACTOR, "acme", "k", expires_at=clock.now() + timedelta(hours=1))
    rotated, record = await directory.create_key(ACTOR, "acme", "k")
    await directory.rotate_key(ACTOR, record.public_id, grace_s=3600)
    await service.authenticate(rotated)
    archived, _ = await directory.create_key(ACTOR, "gone", "k")
    await directory.archive_tenant(ACTOR, "gone")
    await directory.create_project(ACTOR, "acme", "old")
    ended, _ = await directory.create_key(ACTOR, "acme", "k", project="old")
    await directory.archive_project(ACTOR, "acme", "old")
    clock.advance(3600)
    compared: list[str] = []
    monkeypatch.setattr("gateway.tenants.service.matches_either", _counting(compared))
    texts = {
        "unknown": WELL_FORMED,
        "wrong secret": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "revoked": revoked,
        "expired": expired,
        "expired, never used": unused,
        "rotated": rotated,
        "archived": archived,
        "of an archived project": ended,
        "admin": (await directory.create_admin_key(ACTOR))[0],
    }
    for kind, text_ in texts.items():
        for _ in range(2):
            compared.clear()
            with pytest.raises(InvalidKey) as caught:
                await service.authenticate(text_)
            assert str(caught.value) == "the API key is not valid", kind
            assert len(compared) == 1, f"{kind}: told by the time that comparing takes"
    for text_ in (None, "", "sk-penstock-short"):
        with pytest.raises(InvalidKey):
            await service.authenticate(text_)


def _counting(compared: list[str]) -> Callable[..., bool]:
    from gateway.tenants.keys import matches_either

    def compare(secret: str, stored: bytes, previous: bytes | None) -> bool:
        compared.append(secret)
        return matches_either(secret, stored, previous)

    return compare


@given(st.text(max_size=100))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_text_is_a_valid_key_or_not(database_url: str, key: str) -> None:
    async def main() -> None:
        async with opened(database_url) as engine:
            await Tenants(engine, ManualClock()).authenticate(key)

    with pytest.raises(InvalidKey):
        asyncio.run(main())


async def test_a_wrong_secret_does_not_lock_the_right_one_out(directory: Directory, service: Tenants) -> None:
    await directory.create_tenant(ACTOR, "acme")
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    with pytest.raises(InvalidKey):
        await service.authenticate(key[:-1] + ("A" if key[-1] != "A" else "B"))
    await service.authenticate(key)


async def _archive_tenant(directory: Directory, _: str) -> None:
    await directory.archive_tenant(ACTOR, "acme")


async def _archive_project(directory: Directory, _: str) -> None:
    await directory.archive_project(ACTOR, "acme", "default")


async def _revoke(directory: Directory, public_id: str) -> None:
    await directory.revoke_key(ACTOR, public_id)


async def _rotate(directory: Directory, public_id: str) -> None:
    await directory.rotate_key(ACTOR, public_id)


@pytest.mark.parametrize("end", [_archive_tenant, _archive_project, _revoke, _rotate])
@pytest.mark.parametrize("told", ["announced", "by age"])
async def test_a_key_that_ends_ends_on_every_replica(
    end: Callable[[Directory, str], Any],
    told: str,
    directory: Directory,
    service: Tenants,
    engine: AsyncEngine,
    clock: ManualClock,
) -> None:
    other = Tenants(engine, clock, cache_s=5.0)
    await directory.create_tenant(ACTOR, "acme")
    key, record = await directory.create_key(ACTOR, "acme", "k")
    before = [await replica.authenticate(key) for replica in (service, other)]
    await end(directory, record.public_id)
    with pytest.raises(InvalidKey):
        await service.authenticate(key)
    await other.authenticate(key)
    if told == "announced":
        # What admission asks for when it sees the announced generation.
        with pytest.raises(InvalidKey):
            await other.reload(key, at_least=before[1].generation + 1)
    else:
        clock.advance(5)
    with pytest.raises(InvalidKey):
        await other.authenticate(key)


async def test_a_changed_limit_or_setting_reaches_every_replica_by_reload_at_once_else_by_age(
    directory: Directory, service: Tenants, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = Tenants(engine, clock, cache_s=5.0)
    await directory.create_tenant(ACTOR, "acme")
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    stale = await other.authenticate(key)
    await service.authenticate(key)
    limit = await directory.set_limit(ACTOR, "acme", requests_per_minute(60))
    assert shape((await service.authenticate(key)).tenant_limits) == {("tenant", "", "requests", "minute", 60)}
    assert (await other.authenticate(key)).tenant_limits == ()
    fresh = await other.reload(key, at_least=stale.generation + 1)
    assert shape(fresh.tenant_limits) == {("tenant", "", "requests", "minute", 60)}
    assert await other.authenticate(key) == fresh
    await directory.delete_limit(ACTOR, "acme", limit.id)
    await directory.update_tenant(ACTOR, "acme", TenantChange(markup_bp=5))
    assert await other.authenticate(key) == fresh
    clock.advance(5)
    principal = await other.authenticate(key)
    assert (principal.tenant_limits, principal.markup_bp) == ((), 5)


async def test_both_secrets_of_a_rotated_key_are_good_for_its_grace(
    directory: Directory, service: Tenants, engine: AsyncEngine, clock: ManualClock
) -> None:
    replicas = [service, Tenants(engine, clock, cache_s=5.0)]
    await directory.create_tenant(ACTOR, "acme")
    first, record = await directory.create_key(ACTOR, "acme", "k")
    for replica in replicas:
        await replica.authenticate(first)
    second, rotated = await directory.rotate_key(ACTOR, record.public_id, grace_s=100)
    assert rotated.public_id == record.public_id
    assert rotated.previous_until == clock.now() + timedelta(seconds=100)
    clock.advance(5)
    for replica in replicas:
        for key in (first, second):
            assert (await replica.authenticate(key)).key_id == record.public_id
    third, _ = await directory.rotate_key(ACTOR, record.public_id, grace_s=100)
    clock.advance(99.5)
    for replica in replicas:
        for key in (second, third):
            await replica.authenticate(key)
        with pytest.raises(InvalidKey):
            await replica.authenticate(first)
    clock.advance(0.5)
    for replica in replicas:
        await replica.authenticate(third)
        with pytest.raises(InvalidKey):
            await replica.authenticate(second)


async def test_known_keys_stay_good_while_postgres_is_away(
    directory: Directory, clock: ManualClock, engine: AsyncEngine
) -> None:
    await directory.create_tenant(ACTOR, "acme")
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    service = Tenants(engine, clock, cache_s=5.0)
    before = await service.authenticate(key)
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        service._engine = gone
        clock.advance(4.9)
        assert await service.authenticate(key) == before
        with pytest.raises(DatabaseUnavailable):
            await service.reload(key)
        clock.advance(MAX_AWAY_S - 4.9)
        assert await service.authenticate(key, or_old=True) == before
        with pytest.raises(DatabaseUnavailable):
            await service.reload(key)
        clock.advance(0.1)
        with pytest.raises(DatabaseUnavailable):
            await service.authenticate(key, or_old=True)
        service._engine = engine
        assert await service.authenticate(key) == before


async def test_a_read_that_fails_brings_no_revoked_key_back(
    directory: Directory, clock: ManualClock, engine: AsyncEngine
) -> None:
    await directory.create_tenant(ACTOR, "acme")
    tenant_key, tenants_ = await directory.create_key(ACTOR, "acme", "k", scopes={"usage:read"})
    admin_key, admins = await directory.create_admin_key(ACTOR)
    replica = Tenants(engine, clock)
    await replica.authenticate(tenant_key)
    await replica.authenticate_admin(admin_key)
    for record in (tenants_, admins):
        await directory.revoke_key(ACTOR, record.public_id)
    clock.advance(60)
    # Reports and the admin API have no admission behind them that would notice.
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        replica._engine = gone
        with pytest.raises(DatabaseUnavailable):
            await replica.authenticate(tenant_key)
        with pytest.raises(DatabaseUnavailable):
            await replica.authenticate_admin(admin_key)


async def test_admins_keys_are_for_admins_alone(directory: Directory, service: Tenants) -> None:
    await directory.create_tenant(ACTOR, "acme")
    tenant_key, _ = await directory.create_key(ACTOR, "acme", "k")
    key, record = await directory.create_admin_key(ACTOR, "root")
    assert await service.authenticate_admin(key) == AdminPrincipal(record.public_id, "root", "owner")
    viewer, seen = await directory.create_admin_key(ACTOR, "eye", role="viewer")
    assert (await service.authenticate_admin(viewer)).role == "viewer"
    for text_ in (tenant_key, WELL_FORMED, None, "", key + "x"):
        with pytest.raises(InvalidKey):
            await service.authenticate_admin(text_)
    renewed, _ = await directory.rotate_key(ACTOR, seen.public_id)
    with pytest.raises(InvalidKey):
        await service.authenticate_admin(viewer)
    await service.authenticate_admin(renewed)
    await directory.revoke_key(ACTOR, record.public_id)
    with pytest.raises(InvalidKey):
        await service.authenticate_admin(key)


async def test_an_expiry_set_later_holds(directory: Directory, service: Tenants, clock: ManualClock) -> None:
    await directory.create_tenant(ACTOR, "acme")
    key, record = await directory.create_key(ACTOR, "acme", "k")
    await service.authenticate(key)
    change = KeyChange(expires_at=clock.now() + timedelta(seconds=3))
    await directory.update_key(ACTOR, record.public_id, change)
    await service.authenticate(key)
    clock.advance(3)
    with pytest.raises(InvalidKey):
        await service.authenticate(key)


async def test_a_key_made_elsewhere_is_found_after_it_was_unknown(
    directory: Directory, service: Tenants, engine: AsyncEngine, clock: ManualClock
) -> None:
    await directory.create_tenant(ACTOR, "acme")
    key, record = await directory.create_key(ACTOR, "acme", "k")
    async with engine.begin() as connection:
        await connection.execute(update(api_keys).values(public_id="zzzzzzzzzzzz"))
    with pytest.raises(InvalidKey):
        await service.reload(key)
    async with engine.begin() as connection:
        await connection.execute(update(api_keys).values(public_id=record.public_id))
    clock.advance(5)
    await service.authenticate(key)


async def test_a_database_without_tables_is_no_invalid_key(empty_database_url: str, clock: ManualClock) -> None:
    async with opened(empty_database_url) as engine:
        with pytest.raises(Exception, match="api_keys") as caught:
            await Tenants(engine, clock).authenticate(WELL_FORMED)
        assert not isinstance(caught.value, InvalidKey)


async def test_the_schema_itself_keeps_admins_out_of_tenants(directory: Directory, engine: AsyncEngine) -> None:
    tenant = await directory.create_tenant(ACTOR, "acme")
    _, record = await directory.create_admin_key(ACTOR)
    with pytest.raises(Exception, match="admin_has_no_tenant"):
        async with engine.begin() as connection:
            await connection.execute(
                text("UPDATE api_keys SET tenant_id = :id, role = NULL, project_id = (SELECT id FROM projects)"),
                {"id": tenant.id},
            )
    async with engine.connect() as connection:
        assert (await connection.execute(select(tenants.c.id))).scalar_one() == tenant.id
        owner = select(api_keys.c.tenant_id).where(api_keys.c.public_id == record.public_id)
        assert await connection.scalar(owner) is None
