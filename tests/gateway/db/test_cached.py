from __future__ import annotations

import asyncio

from gateway.db.cached import PAUSE_FACTOR, CachedCopy
from gateway.db.engine import DatabaseUnavailable
from tests.gateway.db.support import ManualClock


async def test_what_was_changed_during_a_read_is_read_anew() -> None:
    stored, gate = "before", asyncio.Event()

    async def read() -> str:
        found = stored
        await gate.wait()
        return found

    copy = CachedCopy("it", read, ManualClock(), cache_s=5)
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(copy.current())
        await asyncio.sleep(0)
        stored = "after"
        copy.expire()
        gate.set()
    assert early.result() == "before"
    assert await copy.current() == "after"


async def test_while_postgres_hangs_few_wait_for_it() -> None:
    clock, reads = ManualClock(), 0

    async def read() -> str:
        nonlocal reads
        reads += 1
        if reads == 1:
            return "it"
        await asyncio.sleep(0.02)
        clock.advance(2)
        raise DatabaseUnavailable("away")

    copy = CachedCopy("it", read, clock, cache_s=5)
    assert await copy.current() == "it"
    clock.advance(5)
    assert await asyncio.gather(*(copy.current() for _ in range(5))) == ["it"] * 5
    assert reads == 2
    clock.advance(2 * PAUSE_FACTOR - 0.01)
    assert (await copy.current(), reads) == ("it", 2)
    clock.advance(0.01)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(copy.current())
        await asyncio.sleep(0)
        assert await copy.current() == "it"
        assert not asking.done()
    assert (asking.result(), reads) == ("it", 3)
