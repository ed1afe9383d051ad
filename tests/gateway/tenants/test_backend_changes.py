from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.backends.brands import BRANDS
from gateway.routing.route import Target, new_route
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import BackendChange, BackendExists, BackendSpec, UnknownBackend
from gateway.tenants.catalog import Catalog, UnknownPool
from gateway.tenants.records import ConfigurationError, NotAllowed, StateConflict, VersionConflict
from tests.gateway.billing.support import fetch
from tests.gateway.db.support import ManualClock

ACTOR = Actor("admin-1")
KEY = "sk-very-secret-key-of-a-provider"
HEADERS = {"X-Org": "secret-organisation"}


def spec(name: str = "b", **more: Any) -> BackendSpec:
    values = {"pool": "pool", "brand": "openai", "base_url": "https://api.example.com", "api_key": KEY}
    return BackendSpec(name=name, **(values | {"headers": HEADERS} | more))


@pytest.fixture
async def changes(engine: AsyncEngine, clock: ManualClock, secret_key: SecretKey) -> BackendChanges:
    catalog = Catalog(engine, clock)
    for pool in ("pool", "other"):
        await catalog.create_pool(ACTOR, pool)
    return BackendChanges(engine, secret_key, BRANDS)


async def test_a_backend_reads_back_without_its_secrets_and_is_used_with_them(changes: BackendChanges) -> None:
    record = await changes.create_backend(ACTOR, spec(base_url="https://Api.example.com:8443/proxy/v1/", weight=2.5))
    assert (record.base_url, record.weight, record.version) == ("https://Api.example.com:8443/proxy", 2.5, 1)
    assert record.context_length == 1_048_576
    assert (await changes.create_backend(ACTOR, spec("v", brand="vllm"))).context_length == 131_072
    await changes.delete_backend(ACTOR, "v")
    assert (record.has_api_key, record.header_names, record.enabled) == (True, ("x-org",), True)
    assert await changes.backend("b") == record
    assert await changes.list_backends() == await changes.list_backends(pool="pool") == [record]
    assert await changes.list_backends(after="b") == await changes.list_backends(pool="\x00") == []
    endpoint = await changes.endpoint("b")
    assert endpoint.headers == {"x-org": "secret-organisation", "authorization": f"Bearer {KEY}"}
    assert (endpoint.id, endpoint.family, endpoint.brand, endpoint.sends_model) == ("b", "openai", "openai", None)
    for shown in (repr(record), repr(endpoint), repr(spec()), repr(BackendChange(api_key=KEY, headers=HEADERS))):
        assert KEY not in shown
        assert "secret-organisation" not in shown
    await changes.create_backend(ACTOR, spec("claude", brand="anthropic", headers={}, model="claude-haiku"))
    claude = await changes.endpoint("claude")
    assert claude.headers == {"x-api-key": KEY}
    assert (claude.family, claude.sends_model) == ("anthropic", "claude-haiku")
    with pytest.raises(BackendExists):
        await changes.create_backend(ACTOR, spec())


async def test_nothing_that_is_kept_shows_a_secret(changes: BackendChanges, engine: AsyncEngine) -> None:
    await changes.create_backend(ACTOR, spec())
    await changes.update_backend(ACTOR, "b", BackendChange(api_key=KEY + "2", headers={"x-org": "secret-other"}))
    await changes.update_backend(ACTOR, "b", BackendChange(api_key=None, headers={}))
    await changes.update_backend(ACTOR, "b", BackendChange(api_key=KEY, headers=HEADERS))
    kept = str(await fetch(engine, "SELECT backends::text, encode(api_key, 'escape') key FROM backends"))
    kept += str(await fetch(engine, "SELECT encode(headers, 'escape') FROM backends"))
    kept += str(await fetch(engine, "SELECT audit_log::text FROM audit_log"))
    assert "very-secret" not in kept
    assert "secret-o" not in kept
    assert KEY.encode().hex() not in kept
    told = await fetch(engine, "SELECT action, before, after FROM audit_log WHERE kind = 'backend' ORDER BY id")
    assert told[0]["after"]["has_api_key"] is True
    assert told[1]["after"] == {"version": 2, "api_key": "changed", "headers": "changed"}
    assert told[1]["before"] == {"version": 1, "api_key": "set", "headers": "set"}
    assert told[2]["after"]["has_api_key"] is False
    assert told[2]["before"]["header_names"] == ["x-org"]


async def test_a_change_raises_the_version_and_one_of_nothing_is_none(
    changes: BackendChanges, engine: AsyncEngine
) -> None:
    before = await changes.create_backend(ACTOR, spec())
    after = await changes.update_backend(
        ACTOR, "b", BackendChange(pool="other", priority=3, enabled=False, model="m", idle_timeout_s=1.5), if_version=1
    )
    assert (before.version, after.version) == (1, 2)
    assert (after.pool, after.priority, after.enabled, after.model, after.idle_timeout_s) == (
        "other",
        3,
        False,
        "m",
        1.5,
    )
    assert (await changes.endpoint("b")).headers["authorization"] == f"Bearer {KEY}"
    same = BackendChange(priority=3, api_key=KEY, headers=HEADERS, base_url="https://api.example.com/v1")
    assert await changes.update_backend(ACTOR, "b", same) == after
    assert len(await fetch(engine, "SELECT FROM audit_log WHERE kind = 'backend'")) == 2
    with pytest.raises(VersionConflict):
        await changes.update_backend(ACTOR, "b", BackendChange(priority=4), if_version=1)
    with pytest.raises(VersionConflict):
        await changes.delete_backend(ACTOR, "b", if_version=1)
    outcomes = await asyncio.gather(
        *(changes.update_backend(ACTOR, "b", BackendChange(priority=n), if_version=2) for n in (5, 6, 7)),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["BackendRecord"] + ["VersionConflict"] * 2
    await changes.delete_backend(ACTOR, "b", if_version=3)
    for gone in (
        changes.backend("b"),
        changes.endpoint("b"),
        changes.delete_backend(ACTOR, "b"),
        changes.update_backend(ACTOR, "b", BackendChange(priority=1)),
        changes.backend("\x00"),
    ):
        with pytest.raises(UnknownBackend):
            await gone


async def test_secrets_go_to_no_other_host_unless_they_are_given_anew(changes: BackendChanges) -> None:
    await changes.create_backend(ACTOR, spec())
    elsewhere = "https://api.example.org"
    for change in (
        BackendChange(base_url=elsewhere),
        BackendChange(base_url="http://api.example.com"),
        BackendChange(base_url="https://api.example.com:444"),
        BackendChange(base_url=elsewhere, api_key=KEY),
        BackendChange(base_url=elsewhere, headers=HEADERS),
    ):
        with pytest.raises(ConfigurationError, match="given anew"):
            await changes.update_backend(ACTOR, "b", change)
    same_origin = await changes.update_backend(ACTOR, "b", BackendChange(base_url="https://API.example.com:443/x"))
    assert same_origin.version == 2
    assert (await changes.endpoint("b")).headers["authorization"] == f"Bearer {KEY}"
    moved = await changes.update_backend(ACTOR, "b", BackendChange(base_url=elsewhere, api_key=KEY, headers={}))
    assert (moved.base_url, moved.header_names) == (elsewhere, ())
    assert (await changes.endpoint("b")).headers == {"authorization": f"Bearer {KEY}"}


async def test_a_key_and_a_header_never_take_each_others_place(changes: BackendChanges) -> None:
    of_own = {"x-api-key": "secret-of-a-proxy"}
    await changes.create_backend(ACTOR, spec(headers=of_own))
    await changes.create_backend(ACTOR, spec("keyless", brand="anthropic", api_key=None, headers=of_own))
    for name, change in (
        ("b", BackendChange(brand="anthropic")),
        ("keyless", BackendChange(api_key=KEY)),
        ("b", BackendChange(headers={"Authorization": "Basic"})),
    ):
        with pytest.raises(ConfigurationError, match="there twice"):
            await changes.update_backend(ACTOR, name, change)
    assert (await changes.update_backend(ACTOR, "b", BackendChange(brand="anthropic", headers={}))).version == 2
    assert (await changes.update_backend(ACTOR, "keyless", BackendChange(api_key=None))).version == 1


async def test_what_is_moved_in_the_database_does_not_unseal(changes: BackendChanges, engine: AsyncEngine) -> None:
    await changes.create_backend(ACTOR, spec())
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE backends SET base_url = 'https://evil.example.com'"))
    with pytest.raises(StateConflict, match="set its API key"):
        await changes.endpoint("b")
    await changes.update_backend(ACTOR, "b", BackendChange(api_key=KEY, headers=HEADERS))
    assert (await changes.endpoint("b")).headers["authorization"] == f"Bearer {KEY}"


async def test_without_the_secret_key_only_what_is_no_secret_can_be_set(engine: AsyncEngine, changes: Any) -> None:
    without = BackendChanges(engine, None, BRANDS)
    with pytest.raises(ConfigurationError, match="PENSTOCK_SECRET_KEY"):
        await without.create_backend(ACTOR, spec())
    await without.create_backend(ACTOR, spec(api_key=None, headers={}))
    assert (await without.update_backend(ACTOR, "b", BackendChange(weight=3.0))).weight == 3.0


BAD: list[dict[str, Any]] = [
    {"brand": "penstock"},
    {"brand": "opnai"},
    {"base_url": ""},
    {"base_url": "api.example.com"},
    {"base_url": "ftp://api.example.com"},
    {"base_url": "https://user:pass@api.example.com"},
    {"base_url": "https://user@api.example.com"},
    {"base_url": "https://api.example.com?key=1"},
    {"base_url": "https://api.example.com/#x"},
    {"base_url": "https://api.example.com/a b"},
    {"base_url": "https://api.example.com/\x00"},
    {"base_url": "https://api.example.com/../x"},
    {"base_url": "https://api.example.com//x"},
    {"base_url": "https://api.exämple.com"},
    {"base_url": "https://h:99999"},
    {"base_url": "https://h:0"},
    {"base_url": "https://["},
    {"base_url": "https://[::1"},
    {"base_url": "https://" + "h" * 2000},
    {"api_key": ""},
    {"api_key": "with space"},
    {"api_key": "line\n"},
    {"api_key": "é"},
    {"api_key": "\ud800"},
    {"api_key": "k" * 10_000},
    {"headers": {"Host": "x"}},
    {"headers": {"Connection": "x"}},
    {"headers": {"Content-Length": "1"}},
    {"headers": {"Cookie": "x"}},
    {"headers": {"x-penstock-tenant": "x"}},
    {"headers": {"a b": "x"}},
    {"headers": {"": "x"}},
    {"headers": {"x": ""}},
    {"headers": {"x": "a\r\nb: c"}},
    {"headers": {"x": " padded"}},
    {"headers": {"X-A": "1", "x-a": "2"}},
    {"headers": {"authorization": "Bearer x"}},
    {"headers": {f"x-{n}": "1" for n in range(33)}},
    {"model": ""},
    {"model": "\x00"},
    {"context_length": 0},
    {"context_length": 10**12},
    {"weight": -0.5},
    {"weight": float("nan")},
    {"weight": float("inf")},
    {"priority": -1},
    {"priority": 101},
    {"connect_timeout_s": 0},
    {"first_byte_timeout_s": float("nan")},
    {"idle_timeout_s": 10**9},
    {"pool": "nowhere"},
    {"pool": "\x00"},
]


async def test_what_cannot_be_is_refused_and_shows_no_secret(changes: BackendChanges) -> None:
    await changes.create_backend(ACTOR, spec("there"))
    for bad in BAD:
        with pytest.raises(ConfigurationError) as refused:
            await changes.create_backend(ACTOR, spec(**bad))
        with pytest.raises(ConfigurationError) as refused_too:
            await changes.update_backend(ACTOR, "there", BackendChange(**({"api_key": KEY, "headers": {}} | bad)))
        assert KEY not in str(refused.value) + str(refused_too.value), bad
    for name in ("", "a b", "a/b", "\x00", "\ud800", "x" * 101):
        with pytest.raises(ConfigurationError):
            await changes.create_backend(ACTOR, spec(name))
    with pytest.raises(ConfigurationError, match="twice"):
        await changes.update_backend(ACTOR, "there", BackendChange(headers={"Authorization": "Bearer x"}))
    with pytest.raises(UnknownPool):
        await changes.create_backend(ACTOR, spec(pool="nowhere"))
    (there,) = await changes.list_backends()
    assert there.version == 1


async def test_a_viewer_changes_nothing(changes: BackendChanges) -> None:
    await changes.create_backend(ACTOR, spec())
    viewer = Actor("admin-2", "viewer")
    for change in (
        changes.create_backend(viewer, spec("c")),
        changes.update_backend(viewer, "b", BackendChange(weight=2.0)),
        changes.delete_backend(viewer, "b"),
    ):
        with pytest.raises(NotAllowed):
            await change


async def test_a_pool_that_is_used_is_not_deleted(
    changes: BackendChanges, engine: AsyncEngine, clock: ManualClock
) -> None:
    catalog = Catalog(engine, clock)
    await changes.create_backend(ACTOR, spec())
    with pytest.raises(StateConflict, match=r"backends use the pool 'pool' \(b\)"):
        await catalog.delete_pool(ACTOR, "pool")
    route = new_route("m", pool="other", context_length=100, more_targets=(Target("pool", "x"),))
    await catalog.create_route(ACTOR, route)
    await changes.delete_backend(ACTOR, "b")
    with pytest.raises(StateConflict, match=r"routes use the pool 'pool' \(m\)"):
        await catalog.delete_pool(ACTOR, "pool")
    await catalog.delete_route(ACTOR, "m")
    await catalog.delete_pool(ACTOR, "pool")
