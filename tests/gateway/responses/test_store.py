"""Stored responses on a real Postgres: sealed, one tenant's own, and gone when they expire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import SystemClock
from gateway.db.engine import create_engine
from gateway.db.tables import stored_responses, tenants
from gateway.responses import retention, store
from gateway.responses.conversation import Stored, id_of, listed
from gateway.responses.store import ResponseStore
from gateway.secret_key import SecretKey
from gateway.tenants.principal import Principal

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECRET = SecretKey("secret-key-of-the-tests-of-this-store")
ID = "resp_" + "a" * 32


class Still(SystemClock):
    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def stored(text: str = "said") -> Stored:
    output = [{"type": "message", "id": "msg_2", "role": "assistant", "content": text}]
    return Stored(raw({"id": ID, "output": output}), [raw({"type": "message", "id": "msg_1", "content": "asked"})])


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=3)
    yield engine
    await engine.dispose()


async def tenant(engine: AsyncEngine, name: str) -> Principal:
    tenant_id = uuid4()
    async with engine.begin() as connection:
        await connection.execute(insert(tenants).values(id=tenant_id, name=name, salt="s"))
    return Principal(tenant_id, name, "key", frozenset(("inference",)), 1, "s")


async def rows(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(select(func.count()).select_from(stored_responses)) or 0)


async def test_what_is_put_is_got_by_its_tenant_until_it_expires(engine: AsyncEngine) -> None:
    clock = Still()
    responses = ResponseStore(engine, SECRET, clock, keep_days=2)
    one, other = await tenant(engine, "one"), await tenant(engine, "other")
    assert await responses.put(one, ID, stored())
    assert await responses.put(one, ID, stored("again"))
    found = await responses.get(one.tenant_id, ID)
    assert found is not None
    assert [msgspec.json.decode(item)["content"] for item in found.conversation()] == ["asked", "said"]
    assert await responses.get(other.tenant_id, ID) is None
    assert not await responses.delete(other.tenant_id, ID)
    for wrong in ("", "resp_", ID + "\0", ID.upper(), "resp_" + "b" * 32, ID + "' OR true --"):
        assert await responses.get(one.tenant_id, wrong) is None
        assert not await responses.delete(one.tenant_id, wrong)
    clock.time = NOW + timedelta(days=2) - timedelta(seconds=1)
    assert await responses.get(one.tenant_id, ID) is not None
    clock.time = NOW + timedelta(days=2)
    assert await responses.get(one.tenant_id, ID) is None
    assert not await responses.delete(one.tenant_id, ID)


async def test_a_sealed_response_is_bound_to_key_tenant_and_id(engine: AsyncEngine) -> None:
    responses = ResponseStore(engine, SECRET, Still(), keep_days=2)
    one, other = await tenant(engine, "one"), await tenant(engine, "other")
    await responses.put(one, ID, stored())
    elsewhere = ResponseStore(engine, SecretKey("another-secret-key-of-the-same-tests"), Still(), keep_days=2)
    assert await elsewhere.get(one.tenant_id, ID) is None
    moved = "resp_" + "c" * 32
    async with engine.begin() as connection:
        await connection.execute(update(stored_responses).values(tenant_id=other.tenant_id))
    assert await responses.get(other.tenant_id, ID) is None
    async with engine.begin() as connection:
        await connection.execute(update(stored_responses).values(tenant_id=one.tenant_id, id=moved))
    assert await responses.get(one.tenant_id, moved) is None


async def test_what_cannot_be_kept(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []
    responses = ResponseStore(engine, SECRET, Still(), keep_days=2, count=outcomes.append)
    one = await tenant(engine, "one")
    monkeypatch.setattr(store, "MOST_BYTES", 500)
    assert await responses.put(one, ID, stored("a" * 200))
    assert not await responses.put(one, "resp_" + "b" * 32, stored("a" * 500))
    assert not ResponseStore(engine, SECRET, Still(), keep_days=0).keeps
    away = create_engine("postgresql://nobody@127.0.0.1:1/none")
    assert not await ResponseStore(away, SECRET, Still(), keep_days=2, count=outcomes.append).put(one, ID, stored())
    await away.dispose()
    assert outcomes == ["stored", "too_large", "database_away"]
    assert await rows(engine) == 1


async def test_expired_rows_are_removed_in_batches_and_no_others(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    one, other = await tenant(engine, "one"), await tenant(engine, "other")
    values = [
        {
            "tenant_id": owner.tenant_id,
            "id": f"resp_{number}",
            "project_id": uuid4(),
            "sealed": b"x",
            "expires_at": NOW + timedelta(seconds=number - 5),
        }
        for number in range(10)
        for owner in (one, other)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(stored_responses), values)
    async with engine.connect() as busy, busy.begin():
        # One of them is being deleted at the moment: it is left to whoever does that.
        await busy.execute(
            delete(stored_responses).where(
                stored_responses.c.tenant_id == one.tenant_id, stored_responses.c.id == "resp_0"
            )
        )
        assert await retention.remove_expired(engine, NOW) == 11
    assert await rows(engine) == 8
    assert await retention.remove_expired(engine, NOW) == 0


def test_input_items_are_listed_in_the_form_of_the_api() -> None:
    given = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "type": "message", "id": "msg_own"},
        {"type": "function_call_output", "call_id": "c", "output": "x", "id": None},
        {"role": "user", "content": [{"type": "input_text", "text": "Well?"}], "id": 5},
    ]
    earlier = [raw({"type": "reasoning", "id": "rs_1"})]
    again = [{"type": "reasoning", "id": "rs_1"}, {"type": "message", "id": "msg_own", "role": "user", "content": "a"}]
    items = listed(earlier, [raw(item) for item in [*given, *again]], "ff")
    assert [id_of(item) for item in items] == [
        *("rs_1", "msg_ffi0000", "msg_own", "fco_ffi0002", "msg_ffi0003", "rs_ffi0004", "msg_ffi0005"),
    ]
    _, first, second, *_ = (msgspec.json.decode(item) for item in items)
    assert first == {
        "type": "message",
        "id": "msg_ffi0000",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hello"}],
    }
    assert second["content"] == [{"type": "output_text", "text": "Hi", "annotations": []}]
