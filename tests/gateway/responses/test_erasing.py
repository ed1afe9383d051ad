"""Stored responses erased by tenant, end user and request, with all that was built upon them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import SystemClock
from gateway.db.engine import create_engine, transaction
from gateway.db.tables import stored_responses
from gateway.ids import uuid7
from gateway.responses.conversation import Stored
from gateway.responses.erasing import StoredResponses
from gateway.responses.store import ResponseStore
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.principal import Principal
from tests.gateway.responses.test_store import SECRET, raw, tenant


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=2)
    yield engine
    await engine.dispose()


class Conversations:
    """Written as the door writes them."""

    def __init__(self, engine: AsyncEngine, principal: Principal) -> None:
        self._engine = engine
        self._store = ResponseStore(engine, SECRET, SystemClock(), keep_days=5)
        self.principal = principal

    async def say(self, end_user: str | None = None, after: UUID | None = None) -> UUID:
        request_id, previous = uuid7(), None
        if after is not None:
            found = await self._store.get(self.principal.tenant_id, f"resp_{after.hex}")
            assert found is not None
            previous = (f"resp_{after.hex}", found)
        origins = self._store.origins(self.principal.tenant_id, end_user, previous)
        stored = Stored(raw({"output": []}), [raw({"id": "msg_1"})], origins)
        assert await self._store.put(self.principal, f"resp_{request_id.hex}", stored)
        return request_id

    async def left(self) -> set[UUID]:
        wanted = select(stored_responses.c.id).where(stored_responses.c.tenant_id == self.principal.tenant_id)
        async with self._engine.connect() as connection:
            return {UUID(each.removeprefix("resp_")) for each in await connection.scalars(wanted)}

    def hash(self, end_user: str) -> str:
        return end_user_hash(SECRET, self.principal.tenant_id, end_user)


async def test_what_was_built_upon_it_goes_too(engine: AsyncEngine) -> None:
    one = Conversations(engine, await tenant(engine, "one"))
    other = Conversations(engine, await tenant(engine, "other"))
    room = StoredResponses(engine)
    first = await one.say("ann")
    second = await one.say(None, after=first)
    await one.say("bob", after=second)
    bobs = await one.say("bob")
    nobodys = await one.say()
    theirs = await other.say("ann")
    owner = one.principal.tenant_id
    # A response that was deleted meanwhile is still known to those that hold its conversation.
    async with transaction(engine) as connection:
        await connection.execute(stored_responses.delete().where(stored_responses.c.id == f"resp_{second.hex}"))
    assert await room.erase(owner, request_id=second) == 1
    assert await one.left() == {first, bobs, nobodys}
    fourth = await one.say("bob", after=first)
    assert await room.erase(owner, end_user=one.hash("ann")) == 2
    assert fourth not in await one.left()
    assert await room.erase(owner, end_user=other.hash("ann")) == 0
    assert await room.erase(owner, request_id=theirs) == 0
    assert await room.erase(owner, request_id=uuid4()) == 0
    assert await room.erase(owner, end_user=one.hash("bob")) == 1
    assert await one.left() == {nobodys}
    assert await room.erase(owner) == 1
    assert (await one.left(), await other.left()) == (set(), {theirs})


async def test_what_an_earlier_release_stored_goes_with_whatever_it_may_be_of(engine: AsyncEngine) -> None:
    one = Conversations(engine, await tenant(engine, "one"))
    room, owner = StoredResponses(engine), one.principal.tenant_id
    old, new = await one.say("ann"), await one.say("bob")
    later = uuid7(int((SystemClock().now() + timedelta(days=1)).timestamp() * 1000))
    async with transaction(engine) as connection:
        await connection.execute(
            update(stored_responses)
            .where(stored_responses.c.id == f"resp_{old.hex}")
            .values(end_users=None, built_upon=None)
        )
    assert await room.erase(owner, request_id=later) == 0  # it came after the old one, which cannot hold it
    assert await room.erase(owner, end_user=one.hash("eve")) == 1
    assert await one.left() == {new}
