"""Two replicas' copies of what administrators declare, on one real Postgres."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from gateway.backends.brands import BRANDS
from gateway.clock import SystemClock
from gateway.db.engine import READ_TIMEOUT_S
from gateway.db.migrate import upgrade
from gateway.routing.declared import REFRESH_S, Declared
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import BackendChange, BackendSpec
from gateway.tenants.catalog import Catalog
from tests.gateway.db.support import opened
from tests.ports import free_port

ACTOR = Actor("admin-1")
SECRET_KEY = SecretKey("secret-key-of-the-tests-of-declared")
KEY = "sk-very-secret"


def spec(name: str) -> BackendSpec:
    return BackendSpec(name=name, pool="pool", brand="vllm", base_url="http://10.0.0.1:8000", api_key=KEY)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url) as engine:
        await Catalog(engine, SystemClock()).create_pool(ACTOR, "pool")
        yield engine


def declared(engine: AsyncEngine, *, refresh_s: float = 2.0) -> Declared:
    return Declared(engine, SECRET_KEY, BRANDS, refresh_s=refresh_s)


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what another replica does tells no event
            await asyncio.sleep(0.02)


async def test_a_change_holds_at_once_where_it_is_made_and_within_5_s_elsewhere(engine: AsyncEngine) -> None:
    assert REFRESH_S + READ_TIMEOUT_S < 5
    async with declared(engine) as here, declared(engine) as there, declared(engine, refresh_s=0.05) as elsewhere:
        changes = BackendChanges(engine, SECRET_KEY, BRANDS, changed=here.changed)
        assert here.endpoints("pool") == there.endpoints("pool") == ()
        await changes.create_backend(ACTOR, spec("b"))
        (added,) = here.endpoints("pool")
        assert (added.id, added.family, added.brand, added.revision) == ("b", "openai", "vllm", 1)
        assert added.headers == {"authorization": f"Bearer {KEY}"}
        await until(lambda: there.endpoints("pool") == [added])
        await changes.update_backend(ACTOR, "b", BackendChange(weight=2.0, api_key="other"))
        (changed,) = here.endpoints("pool")
        assert (changed.weight, changed.headers, changed.revision) == (2.0, {"authorization": "Bearer other"}, 2)
        await until(lambda: elsewhere.endpoints("pool") == [changed])
        await changes.update_backend(ACTOR, "b", BackendChange(enabled=False))
        assert here.endpoints("pool") == ()
        await until(lambda: elsewhere.endpoints("pool") == ())
        await changes.update_backend(ACTOR, "b", BackendChange(enabled=True))
        await until(lambda: len(elsewhere.endpoints("pool")) == 1)
        await changes.delete_backend(ACTOR, "b")
        assert here.all() == []
        await until(lambda: elsewhere.all() == [])


async def test_the_last_copy_stays_while_postgres_is_away(engine: AsyncEngine) -> None:
    await BackendChanges(engine, SECRET_KEY, BRANDS).create_backend(ACTOR, spec("b"))
    async with opened(f"postgresql://u:p@127.0.0.1:{free_port()}/gone") as gone:
        with capture_logs() as logs:
            async with declared(engine, refresh_s=0.02) as copy:
                (kept,) = copy.endpoints("pool")
                copy._engine = gone
                await until(lambda: any(entry["event"] == "declared_backends_not_refreshed" for entry in logs))
                await copy.changed()
                await asyncio.sleep(0.1)
                assert copy.endpoints("pool") == [kept]
                copy._engine = engine
                await BackendChanges(engine, SECRET_KEY, BRANDS).create_backend(ACTOR, spec("c"))
                await until(lambda: len(copy.all()) == 2)
        assert [entry["event"] for entry in logs].count("declared_backends_not_refreshed") == 1  # not each time
        async with declared(gone) as never:
            assert never.all() == []


async def test_it_waits_for_a_database_that_is_yet_to_be_migrated(empty_database_url: str) -> None:
    async with opened(empty_database_url) as engine, declared(engine, refresh_s=0.02) as copy:
        assert copy.all() == []
        await asyncio.to_thread(upgrade, empty_database_url)
        await Catalog(engine, SystemClock()).create_pool(ACTOR, "pool")
        await BackendChanges(engine, SECRET_KEY, BRANDS).create_backend(ACTOR, spec("b"))
        await until(lambda: len(copy.all()) == 1)


async def test_what_cannot_be_used_is_left_out_and_told_once(engine: AsyncEngine) -> None:
    changes = BackendChanges(engine, SECRET_KEY, BRANDS)
    for name in ("good", "other-key", "moved", "unknown"):
        await changes.create_backend(ACTOR, spec(name))
    other = BackendChanges(engine, SecretKey("another-secret-key-of-another-house"), BRANDS)
    await other.update_backend(ACTOR, "other-key", BackendChange(api_key=KEY + "2"))
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE backends SET base_url = 'http://10.0.0.2' WHERE name = 'moved'"))
        await connection.execute(text("UPDATE backends SET brand = 'of-tomorrow' WHERE name = 'unknown'"))
    with capture_logs() as logs:
        async with declared(engine) as copy:
            for _ in range(3):
                await copy.refresh()
            assert [endpoint.id for endpoint in copy.endpoints("pool")] == ["good"]
    left_out = {entry["backend"]: entry["reason"] for entry in logs if entry["event"] == "declared_backend_left_out"}
    assert len([entry for entry in logs if entry["log_level"] == "error"]) == len(left_out) == 3
    assert "PENSTOCK_SECRET_KEY" in left_out["other-key"]
    assert "of-tomorrow" in left_out["unknown"]
    assert KEY not in str(logs)


async def test_closing_does_not_wait_for_the_next_look(engine: AsyncEngine) -> None:
    began = time.monotonic()
    async with declared(engine, refresh_s=60.0):
        pass
    assert time.monotonic() - began < 10
