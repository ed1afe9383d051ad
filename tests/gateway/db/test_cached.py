from __future__ import annotations

import asyncio

from gateway.db.cached import CachedCopy
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
