"""Many entries with long bodies: lists leave the bodies alone, exports hold a few at a time."""

from __future__ import annotations

import tracemalloc
from random import Random
from uuid import UUID

import pytest

from gateway.promptlog import log as log_module
from gateway.promptlog import reader as reader_module
from gateway.promptlog.filters import Filters
from tests.gateway.promptlog.support import FULL, Rig, answer, body, entry

BODY = body(Random(1).randbytes(26_000).hex())
"""Which compresses to half of it."""
BODY_BYTES = 50_000


@pytest.fixture
async def filled(rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many entries there are."""
    count = 400
    for n in range(count):
        rig.log.record(FULL, entry(acme, model="rare" if n == 0 else "m", request=BODY, response=answer(f"{n}")))
        if n % 100 == 99:
            await rig.log.flush()
    assert not rig.lost
    return count


async def sent(rig: Rig) -> int:
    """Bytes that Redis has sent so far, but for what it takes to ask."""
    told = (await rig.redis.command("INFO", "stats")).decode()
    return int(next(line.partition(":")[2] for line in told.splitlines() if line.startswith("total_net_output_bytes:")))


async def test_a_list_loads_no_bodies(rig: Rig, acme: UUID, filled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PAGE_S", 60.0)
    assert len(BODY) > BODY_BYTES
    stored = await rig.store.bytes_of(acme)
    before = await sent(rig)
    page = await rig.reader.page(acme, Filters(model="rare"), limit=50)
    read = await sent(rig) - before
    assert (len(page.entries), page.examined) == (1, filled)
    assert read < 1000 * filled
    assert read < stored / 10


async def test_an_export_holds_a_few_entries_at_a_time(rig: Rig, acme: UUID, filled: int) -> None:
    total, lines = 0, 0
    tracemalloc.start()
    try:
        async for line in rig.reader.export(acme):
            total += len(line)
            lines += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lines == filled
    assert total > filled * BODY_BYTES
    # Its own bound, once sealed and once open; beside it a batch of metadata.
    assert peak < 3 * reader_module.IN_FLIGHT_BYTES < total / 3


async def test_what_waits_to_be_written_is_bounded(rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MOST_BYTES", 20 * len(BODY))
    for _ in range(100):
        rig.log.record(FULL, entry(acme, request=BODY, response=b""))
    assert rig.log._bytes <= 10 * len(BODY)
    await rig.log.flush()
    assert (rig.log._bytes, rig.log._bytes_of) == (0, {})
    assert rig.lost["queue_full"] > 80
