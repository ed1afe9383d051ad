from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import DatabaseUnavailable
from gateway.db.tables import api_keys, tenants
from gateway.local.services import free_port
from gateway.tenants.principal import Budget, Limits
from gateway.tenants.records import (
    ConfigurationError,
    InvalidKey,
    TenantExists,
    UnknownKey,
    UnknownTenant,
)
from gateway.tenants.service import AdminPrincipal, Tenants
from tests.gateway.db.support import ManualClock, opened

LIMITS = Limits(60, 4, Budget(25 * 10**9, "month", "Europe/Berlin"))
WELL_FORMED = "sk-penstock-abcdefghij01-" + "s" * 43


class Announcements:
    def __init__(self) -> None:
        self.heard: list[tuple[UUID, int]] = []

    async def __call__(self, tenant_id: UUID, generation: int) -> None:
        self.heard.append((tenant_id, generation))


@pytest.fixture
def announced() -> Announcements:
    return Announcements()


@pytest.fixture
def service(engine: AsyncEngine, clock: ManualClock, announced: Announcements) -> Tenants:
    return Tenants(engine, clock, announce=announced)


async def test_a_key_gives_the_tenants_principal(service: Tenants) -> None:
    tenant = await service.create_tenant("acme", LIMITS)
    text_, record = await service.create_key(
        "acme", "ci", scopes={"inference", "usage:read"}, allowed_models=["m", "n"]
    )
    principal = await service.authenticate(text_)
    assert (principal.tenant_id, principal.tenant_name, principal.key_id) == (tenant.id, "acme", record.public_id)
    assert principal.scopes == {"inference", "usage:read"}
    assert principal.limits == LIMITS
    assert principal.allowed_models == {"m", "n"}
    assert principal.generation == 2


async def test_no_limits_and_every_model_by_default(service: Tenants) -> None:
    await service.create_tenant("acme")
    principal = await service.authenticate((await service.create_key("acme", "k"))[0])
    assert principal.limits == Limits()
    assert principal.scopes == {"inference"}
    assert principal.allowed_models is None


async def test_zero_is_a_limit(service: Tenants) -> None:
    limits = Limits(0, 0, Budget(0, "total", "UTC"))
    await service.create_tenant("acme", limits)
    assert (await service.tenant("acme")).limits == limits


async def test_salts_differ_between_tenants_and_stay(service: Tenants) -> None:
    salts = []
    for name in ("acme", "globex"):
        await service.create_tenant(name)
        first, second = [(await service.create_key(name, "k"))[0] for _ in range(2)]
        assert (await service.authenticate(first)).salt == (await service.authenticate(second)).salt
        salts.append((await service.authenticate(first)).salt)
    assert salts[0] != salts[1]


async def test_only_the_hash_is_stored(service: Tenants, engine: AsyncEngine) -> None:
    await service.create_tenant("acme")
    key, record = await service.create_key("acme", "k")
    secret = key.rpartition(record.public_id + "-")[2]
    async with engine.connect() as connection:
        stored = repr((await connection.execute(select(api_keys))).all())
    assert record.public_id in stored
    assert secret not in stored
    assert secret not in repr(record)


async def test_keys_that_are_not_valid_look_alike(service: Tenants, clock: ManualClock) -> None:
    await service.create_tenant("acme")
    key, _ = await service.create_key("acme", "k")
    revoked, record = await service.create_key("acme", "k")
    await service.revoke_key(record.public_id)
    expired, _ = await service.create_key("acme", "k", expires_at=clock.now() + timedelta(hours=1))
    await service.authenticate(expired)
    clock.advance(3600)
    texts = {
        "missing": None,
        "empty": "",
        "malformed": "sk-penstock-short",
        "unknown": WELL_FORMED,
        "wrong secret": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "revoked": revoked,
        "expired": expired,
        "admin": (await service.create_admin_key())[0],
    }
    for kind, text_ in texts.items():
        for _ in range(2):
            with pytest.raises(InvalidKey) as caught:
                await service.authenticate(text_)
            assert str(caught.value) == "the API key is not valid", kind


@given(st.text(max_size=100))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_text_is_a_valid_key_or_not(database_url: str, key: str) -> None:
    async def main() -> None:
        async with opened(database_url) as engine:
            await Tenants(engine, ManualClock()).authenticate(key)

    with pytest.raises(InvalidKey):
        asyncio.run(main())


async def test_a_wrong_secret_does_not_lock_the_right_one_out(service: Tenants) -> None:
    await service.create_tenant("acme")
    key, _ = await service.create_key("acme", "k")
    with pytest.raises(InvalidKey):
        await service.authenticate(key[:-1] + ("A" if key[-1] != "A" else "B"))
    await service.authenticate(key)


async def test_every_change_raises_the_generation_and_announces_it(service: Tenants, announced: Announcements) -> None:
    tenant = await service.create_tenant("acme")
    _, record = await service.create_key("acme", "k")
    await service.set_limits("acme", LIMITS)
    await service.revoke_key(record.public_id)
    assert announced.heard == [(tenant.id, generation) for generation in (1, 2, 3, 4)]
    assert (await service.tenant("acme")).generation == 4


async def test_a_change_on_one_replica_reaches_another_by_reload_at_once_else_by_age(
    service: Tenants, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = Tenants(engine, clock, cache_s=5.0)
    await service.create_tenant("acme")
    key, record = await service.create_key("acme", "k")
    stale = await other.authenticate(key)
    await service.set_limits("acme", LIMITS)
    assert (await other.authenticate(key)).limits == Limits()
    assert (await other.reload(key, at_least=stale.generation + 1)).limits == LIMITS
    assert (await other.authenticate(key)).limits == LIMITS

    await service.revoke_key(record.public_id)
    await other.authenticate(key)
    clock.advance(5)
    with pytest.raises(InvalidKey):
        await other.authenticate(key)


async def test_reload_sees_a_revocation_at_once(service: Tenants, engine: AsyncEngine, clock: ManualClock) -> None:
    other = Tenants(engine, clock)
    await service.create_tenant("acme")
    key, record = await service.create_key("acme", "k")
    await other.authenticate(key)
    await service.revoke_key(record.public_id)
    with pytest.raises(InvalidKey):
        await other.reload(key)
    with pytest.raises(InvalidKey):
        await other.authenticate(key)


async def test_the_replica_that_changes_sees_it_at_once(service: Tenants) -> None:
    await service.create_tenant("acme")
    key, record = await service.create_key("acme", "k")
    await service.authenticate(key)
    await service.set_limits("acme", LIMITS)
    assert (await service.authenticate(key)).limits == LIMITS
    await service.revoke_key(record.public_id)
    with pytest.raises(InvalidKey):
        await service.authenticate(key)


async def test_a_lost_announcement_does_not_undo_the_change(engine: AsyncEngine, clock: ManualClock) -> None:
    async def fail(tenant_id: UUID, generation: int) -> None:
        raise ConnectionError("Redis is away")

    service = Tenants(engine, clock, announce=fail)
    await service.create_tenant("acme")
    assert (await service.set_limits("acme", LIMITS)).limits == LIMITS
    assert (await service.tenant("acme")).limits == LIMITS


async def test_cached_principals_outlive_postgres_by_their_cache_time(
    database_url: str, clock: ManualClock, engine: AsyncEngine
) -> None:
    await Tenants(engine, clock).create_tenant("acme")
    key, _ = await Tenants(engine, clock).create_key("acme", "k")
    service = Tenants(engine, clock, cache_s=5.0)
    before = await service.authenticate(key)
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        service._engine = gone
        clock.advance(4.9)
        assert await service.authenticate(key) == before
        with pytest.raises(DatabaseUnavailable):
            await service.reload(key)
        clock.advance(0.1)
        with pytest.raises(DatabaseUnavailable):
            await service.authenticate(key)
        service._engine = engine
        assert await service.authenticate(key) == before


async def test_limits_are_changed_by_a_function_of_those_in_force(service: Tenants) -> None:
    await service.create_tenant("acme", Limits(0, 0))

    async def count() -> None:
        await service.set_limits(
            "acme", lambda old: replace(old, requests_per_minute=(old.requests_per_minute or 0) + 1)
        )

    await asyncio.gather(*(count() for _ in range(8)))
    record = await service.tenant("acme")
    assert record.limits == Limits(8, 0)
    assert record.generation == 9


async def test_a_budget_can_be_changed_and_lifted(service: Tenants) -> None:
    await service.create_tenant("acme", LIMITS)
    daily = Limits(budget=Budget(5, "day", "Asia/Kathmandu"))
    assert (await service.set_limits("acme", daily)).limits == daily
    assert (await service.tenant("acme")).limits == daily
    await service.set_limits("acme", Limits())
    assert (await service.tenant("acme")).limits == Limits()


async def test_names_are_unique_and_plain(service: Tenants) -> None:
    await service.create_tenant("acme")
    with pytest.raises(TenantExists):
        await service.create_tenant("acme")
    for name in ("", "-x", "a b", "a,b", "=1+1", "a\nb", "a\x00b", "é", "a" * 101):
        with pytest.raises(ConfigurationError):
            await service.create_tenant(name)
        with pytest.raises(ConfigurationError):
            await service.create_key("acme", name)
    assert [record.name for record in await service.list_tenants()] == ["acme"]


async def test_limits_that_make_no_sense_are_refused(service: Tenants) -> None:
    await service.create_tenant("acme")
    for limits in (
        Limits(requests_per_minute=-1),
        Limits(max_concurrent=2**31),
        Limits(budget=Budget(-1, "day", "UTC")),
        Limits(budget=Budget(2**53, "day", "UTC")),
        Limits(budget=Budget(1, "day", "Mars/Olympus")),
        Limits(budget=Budget(1, "day", "../../etc/passwd")),
        Limits(budget=Budget(1, "day", "")),
        Limits(budget=Budget(1, "year", "UTC")),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError):
            await service.create_tenant("globex", limits)
        with pytest.raises(ConfigurationError):
            await service.set_limits("acme", limits)
    assert (await service.tenant("acme")).generation == 1


async def test_keys_of_no_use_are_not_issued(service: Tenants, clock: ManualClock) -> None:
    await service.create_tenant("acme")
    for scopes in (set(), {"admin"}, {"inference", "nonsense"}):
        with pytest.raises(ConfigurationError):
            await service.create_key("acme", "k", scopes=scopes)
    naive = datetime(2027, 1, 1)  # noqa: DTZ001 - what is refused
    for expires_at in (clock.now(), clock.now() - timedelta(days=1), naive):
        with pytest.raises(ConfigurationError):
            await service.create_key("acme", "k", expires_at=expires_at)
    assert await service.list_keys("acme") == []


async def test_unknown_tenants_and_keys_are_named(service: Tenants) -> None:
    for name in ("nobody", "", "a\x00b", "\ud800"):
        for call in (
            service.tenant(name),
            service.set_limits(name, Limits()),
            service.create_key(name, "k"),
            service.list_keys(name),
        ):
            with pytest.raises(UnknownTenant):
                await call
        with pytest.raises(UnknownKey):
            await service.revoke_key(name)


async def test_revoking_twice_keeps_the_first_time(service: Tenants) -> None:
    await service.create_tenant("acme")
    _, record = await service.create_key("acme", "k")
    first = await service.revoke_key(record.public_id)
    assert first.revoked_at is not None
    assert (await service.revoke_key(record.public_id)).revoked_at == first.revoked_at
    assert await service.list_keys("acme") == [first]


async def test_admins_keys_are_for_admins_alone(service: Tenants, clock: ManualClock) -> None:
    await service.create_tenant("acme")
    tenant_key, _ = await service.create_key("acme", "k")
    key, record = await service.create_admin_key("root")
    assert await service.authenticate_admin(key) == AdminPrincipal(record.public_id, "root")
    for text_ in (tenant_key, WELL_FORMED, None, "", key + "x"):
        with pytest.raises(InvalidKey):
            await service.authenticate_admin(text_)
    assert [entry.public_id for entry in await service.list_keys()] == [record.public_id]
    await service.revoke_key(record.public_id)
    with pytest.raises(InvalidKey):
        await service.authenticate_admin(key)


async def test_a_key_made_elsewhere_is_found_after_it_was_unknown(
    service: Tenants, engine: AsyncEngine, clock: ManualClock
) -> None:
    await service.create_tenant("acme")
    key, record = await service.create_key("acme", "k")
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


async def test_the_schema_itself_keeps_admins_out_of_tenants(service: Tenants, engine: AsyncEngine) -> None:
    tenant = await service.create_tenant("acme")
    _, record = await service.create_admin_key()
    with pytest.raises(Exception, match="admin_has_no_tenant"):
        async with engine.begin() as connection:
            await connection.execute(
                update(api_keys).where(api_keys.c.public_id == record.public_id).values(tenant_id=tenant.id)
            )
    async with engine.connect() as connection:
        assert (await connection.execute(select(text("count(*)")).select_from(tenants))).scalar_one() == 1
