"""Answers of idempotency keys erased: one request's, or all of a tenant's, kept ones and those that run."""

from __future__ import annotations

from uuid import UUID

import pytest

from gateway.admission.redis import RedisUnavailable
from gateway.idempotency.erasing import IdempotentAnswers
from gateway.idempotency.scope import Scope
from gateway.idempotency.store import Lost, Rules, Store
from gateway.ids import uuid7
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import tenant
from tests.gateway.idempotency.support import connect, scope


async def test_one_request_and_all_of_a_tenant(redis_url: str) -> None:
    redis = connect(redis_url)
    store, room = Store(redis, Rules()), IdempotentAnswers(redis)
    mine, other = tenant(), tenant()

    async def answered(whose: Principal, key: str, *, complete: bool = True) -> tuple[Scope, UUID]:
        where, owner = scope(whose, key), uuid7()
        assert await store.begin(where, owner) == owner
        assert await store.share(where, owner, 0, [b"sealed"], complete=complete) in ("KEPT", "SHARED")
        return where, owner

    async def there(where: Scope, owner: UUID) -> bool:
        try:
            return (await store.read(where, owner, 0, 10)).found == [b"sealed"]
        except Lost:
            return False

    first, second, running = (
        await answered(mine, "1"),
        await answered(mine, "2"),
        await answered(mine, "3", complete=False),
    )
    theirs = await answered(other, "1")
    assert await room.erase(mine.tenant_id, request_id=theirs[1]) == 0
    assert await room.erase(mine.tenant_id, request_id=first[1]) == 1
    assert [await there(*each) for each in (first, second, running, theirs)] == [False, True, True, True]
    # Nobody can tell whose an answer is: of an end user's erasure all of the tenant's go.
    assert await room.erase(mine.tenant_id, end_user="a" * 32) == 2
    assert [await there(*each) for each in (second, running, theirs)] == [False, False, True]
    # Who still runs is told so, and keeps nothing more; whoever repeats a request has it run anew.
    where, owner = running
    assert await store.share(where, owner, 1, [b"more"], complete=True) == "LOST"
    again = uuid7()
    assert await store.begin(second[0], again) == again
    assert await room.erase(mine.tenant_id) == 1
    counted = await redis.command("HGET", second[0].keys[3], "total")
    assert int(counted) == 0
    assert await room.erase(mine.tenant_id) == 0
    await redis.close()
    with pytest.raises(RedisUnavailable):
        await room.erase(mine.tenant_id)
