"""Data keys on a real Postgres: made once, cached briefly, erased at once, wrapped anew while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.datakeys import rows, service
from gateway.datakeys.data_key import key_id_of
from gateway.datakeys.master_keys import MasterKeys, UnknownMasterKey
from gateway.datakeys.service import DataKeys
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import data_keys
from gateway.secret_key import SecretKey
from tests.gateway.datakeys.support import MASTER_KEYS, NEW, OLD, tenant
from tests.gateway.db.support import ManualClock, opened

USER = "a" * 32


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=5) as engine:
        yield engine


@asynccontextmanager
async def keys_of(
    engine: AsyncEngine, masters: MasterKeys = MASTER_KEYS, clock: ManualClock | None = None
) -> AsyncIterator[DataKeys]:
    async with DataKeys(engine, masters, clock or ManualClock()) as keys:
        yield keys


@asynccontextmanager
async def statements(engine: AsyncEngine) -> AsyncIterator[list[str]]:
    """Those that run in the block."""
    seen: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine.sync_engine, "before_cursor_execute", note)


async def wrapped_rows(engine: AsyncEngine) -> dict[UUID, tuple[bytes, str]]:
    async with transaction(engine) as connection:
        rows = await connection.execute(select(data_keys.c.id, data_keys.c.wrapped, data_keys.c.master_id))
        return {id: (wrapped, master_id) for id, wrapped, master_id in rows}


async def test_one_key_for_a_tenant_and_one_for_each_end_user(engine: AsyncEngine) -> None:
    acme, globex = await tenant(engine, "acme"), await tenant(engine, "globex")
    async with keys_of(engine) as keys, keys_of(engine) as elsewhere:
        own = await keys.key(acme)
        owners = [(acme, None), (acme, USER), (globex, None), (globex, USER)]
        found = await elsewhere.keys(owners)
        assert found[acme, None].id == own.id
        assert len({key.id for key in found.values()}) == 4
        sealed = own.seal(b"said", b"here")
        key_id = key_id_of(sealed)
        assert key_id is not None
        again = await elsewhere.by_id(acme, key_id)
        assert again is not None
        assert again.unseal(sealed, b"here") == b"said"
        assert await elsewhere.by_id(globex, own.id) is None, "an id opens nothing of another tenant"
        by_ids = await keys.by_ids(acme, [own.id, unknown := uuid4()])
        assert {key_id: key and key.id for key_id, key in by_ids.items()} == {own.id: own.id, unknown: None}


async def test_replicas_that_make_the_same_keys_at_once_agree(engine: AsyncEngine) -> None:
    acme = await tenant(engine)
    users = [f"{n:032x}" for n in range(40)]
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(keys_of(engine)) for _ in range(4)]
        orders = [users, users[::-1], users[20:] + users[:20], users[::3] + users]
        found = await asyncio.gather(
            *(keys.keys([(acme, user) for user in order]) for keys, order in zip(replicas, orders, strict=True))
        )
    ids = [{owner: key.id for owner, key in each.items()} for each in found]
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert len(set(ids[0].values())) == 40


async def test_a_key_is_kept_for_five_seconds_and_no_longer(engine: AsyncEngine) -> None:
    acme, clock = await tenant(engine), ManualClock()
    async with keys_of(engine, clock=clock) as keys, keys_of(engine) as elsewhere:
        first = await keys.key(acme, USER)
        async with statements(engine) as seen:
            await asyncio.gather(*(keys.key(acme, USER) for _ in range(50)))
            assert seen == []
        assert await elsewhere.erase(acme, USER) == 1
        clock.advance(4.9)
        assert (await keys.key(acme, USER)).id == first.id
        clock.advance(0.2)
        assert (await keys.key(acme, USER)).id != first.id
        assert await elsewhere.by_id(acme, first.id) is None


async def test_many_that_ask_at_once_share_one_reading(engine: AsyncEngine) -> None:
    acme = await tenant(engine)
    async with keys_of(engine) as keys:
        await keys.key(acme)
        await keys.erase(uuid4())
        keys._loader.forget(acme)
        async with statements(engine) as seen:
            found = await asyncio.gather(*(keys.key(acme) for _ in range(50)))
        assert len({id(key) for key in found}) == 1
        assert len([one for one in seen if "data_keys" in one]) == 1


async def test_erasure_takes_the_tenant_s_or_the_one_end_user_s(engine: AsyncEngine) -> None:
    acme, globex = await tenant(engine, "acme"), await tenant(engine, "globex")
    async with keys_of(engine) as keys:
        found = await keys.keys([(acme, None), (acme, USER), (acme, "b" * 32), (globex, None)])
        ids = {owner: key.id for owner, key in found.items()}
        assert await keys.erase(acme, USER) == 1
        assert await keys.erase(acme, USER) == 0
        assert await keys.living(acme, ids.values()) == {ids[acme, None], ids[acme, "b" * 32]}
        assert await keys.erase(acme) == 2
        assert await keys.living(acme, ids.values()) == set()
        assert await keys.by_id(acme, ids[acme, None]) is None
        assert (await keys.by_id(globex, ids[globex, None])) is not None
        assert (await keys.key(acme)).id != ids[acme, None]


async def test_what_is_read_while_it_is_erased_is_read_again(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = await tenant(engine)
    async with keys_of(engine) as keys:
        readings = 0

        async def overtaken(*arguments: Any) -> Any:
            nonlocal readings
            readings += 1
            found = await rows.read_batch(*arguments)
            if readings == 1:
                assert await keys.erase(acme) == 1
            return found

        monkeypatch.setattr(service, "read_batch", overtaken)
        key = await keys.key(acme)
        assert readings == 2
        assert await keys.living(acme, [key.id]) == {key.id}


async def test_rewrapping_goes_on_where_it_broke_off_and_serves_meanwhile(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BATCH", 3)
    acme = await tenant(engine)
    owners = [(acme, f"{n:032x}") for n in range(7)]
    async with keys_of(engine) as keys:
        sealed = {owner: key.seal(b"said", b"") for owner, key in (await keys.keys(owners)).items()}
    both = MasterKeys(NEW, OLD)
    async with keys_of(engine, both) as keys:
        wrapped, _ = await keys._rewrap_batch(UUID(int=0)) or (0, None)
        assert wrapped == 3  # and then the command was killed
        assert sorted((await keys.by_master_key()).values()) == [3, 4]
        for owner, key in (await keys.keys(owners)).items():
            assert key.unseal(sealed[owner], b"") == b"said"
        assert sum(await asyncio.gather(keys.rewrap(), keys.rewrap())) == 4
        assert await keys.rewrap() == 0
        assert await keys.by_master_key() == {keys.master_id: 7}
    async with keys_of(engine, MasterKeys(NEW)) as keys:
        for owner, key in (await keys.keys(owners)).items():
            assert key.unseal(sealed[owner], b"") == b"said"
    async with keys_of(engine, MasterKeys(OLD)) as keys:
        with pytest.raises(UnknownMasterKey, match="PENSTOCK_PREVIOUS_MASTER_KEY"):
            await keys.key(*owners[0])
        assert await keys.keys(owners) == {}
        assert await keys.rewrap() == 0


async def test_a_row_that_does_not_open_keeps_no_other_from_being_wrapped_anew(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BATCH", 2)
    acme = await tenant(engine)
    async with keys_of(engine) as keys:
        found = await keys.keys([(acme, f"{n:032x}") for n in range(5)])
        broken = min(key.id for key in found.values())
        async with transaction(engine) as connection:
            await connection.execute(update(data_keys).where(data_keys.c.id == broken).values(wrapped=b"x" * 60))
    async with keys_of(engine, MasterKeys(NEW, OLD)) as keys:
        assert await keys.rewrap() == 4
        assert sorted((await keys.by_master_key()).values()) == [1, 4]


async def test_a_row_that_was_moved_to_another_owner_is_not_opened(engine: AsyncEngine) -> None:
    acme, globex = await tenant(engine, "acme"), await tenant(engine, "globex")
    async with keys_of(engine) as keys:
        good = await keys.key(globex, USER)
        key = await keys.key(acme)
        async with transaction(engine) as connection:
            await connection.execute(update(data_keys).where(data_keys.c.id == key.id).values(tenant_id=globex))
    async with keys_of(engine) as keys:
        found = await keys.keys([(globex, None), (globex, USER)])
        assert {owner: key.id for owner, key in found.items()} == {(globex, USER): good.id}
        with pytest.raises(UnknownMasterKey, match="another PENSTOCK_SECRET_KEY, or was changed"):
            await keys.by_id(globex, key.id)


async def test_a_tenant_that_is_not_there_costs_others_nothing(engine: AsyncEngine) -> None:
    acme = await tenant(engine)
    async with keys_of(engine) as keys:
        nobody = uuid4()
        assert set(await keys.keys([(acme, None), (nobody, None)])) == {(acme, None)}
        with pytest.raises(DatabaseUnavailable, match="refused"):
            await keys.key(nobody)


async def test_while_postgres_is_away_one_waits_and_the_others_are_told(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "transaction", partial(transaction, timeout_s=0.3))
    acme, clock = await tenant(engine), ManualClock()
    async with keys_of(engine, clock=clock) as keys:
        kept = await keys.key(acme)
        async with engine.connect() as blocker:
            await blocker.execute(text("LOCK TABLE data_keys"))
            users = [(acme, f"{n:032x}") for n in range(3)]
            first = asyncio.create_task(keys.key(*users[0]))
            await asyncio.sleep(0.05)
            others = [keys.key(*user) for user in users[1:]]
            told = await asyncio.gather(first, *others, return_exceptions=True)
            assert [type(each) for each in told] == [DatabaseUnavailable] * 3
            async with statements(engine) as seen:
                with pytest.raises(DatabaseUnavailable):
                    await keys.key(*users[0])
                assert (await keys.key(acme)).id == kept.id, "what is kept serves"
                assert seen == []
        clock.advance(60)
        assert await keys.key(*users[0])


async def test_no_row_shows_a_key(engine: AsyncEngine) -> None:
    acme = await tenant(engine)
    async with keys_of(engine) as keys:
        key = await keys.key(acme)
    ((wrapped, master_id),) = (await wrapped_rows(engine)).values()
    assert key._secret not in wrapped
    assert master_id not in OLD.keyed_hash("data key")


def test_master_keys_as_settings_have_them() -> None:
    secret, master = "s" * 32, "m" * 32
    bare = MasterKeys.configured(secret, None, None)
    place = (uuid4(), "", uuid4())
    wrapped = bare.wrap(b"k" * 32, *place)
    # A master key that is set later needs no word of the one that was made for want of it.
    later = MasterKeys.configured(secret, master, None)
    assert later.current_id != bare.current_id
    assert later.unwrap(wrapped, bare.current_id, *place) == b"k" * 32
    third = MasterKeys.configured(secret, "n" * 32, master)
    assert third.unwrap(later.wrap(b"l" * 32, *place), later.current_id, *place) == b"l" * 32
    assert set(third.former_ids) == {bare.current_id, later.current_id}
    assert MasterKeys.configured(secret, master, master).former_ids == [bare.current_id]
    with pytest.raises(UnknownMasterKey):
        MasterKeys(SecretKey(master)).unwrap(wrapped, bare.current_id, *place)
