"""Erasure: unreadable in Redis' own files, and gone; also what comes late, and what is written by an erased key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisUnavailable, create_redis
from gateway.clock import SystemClock
from gateway.datakeys.data_key import DataKey, key_id_of
from gateway.db.engine import transaction
from gateway.db.tables import data_keys
from gateway.ids import uuid7
from gateway.local.services import EmbeddedRedis
from gateway.promptlog.eraser import Erasable, Eraser, Receipt
from gateway.promptlog.sealing import Unreadable, unpack_body, unpack_metadata
from tests.gateway.promptlog.support import ANN, BOB, FULL, Rig, account, answer, entry, names
from tests.gateway.promptlog.support import rig as make_rig


class Room:
    """Another room that keeps something."""

    kind = "cached_answers"

    def __init__(self, fault: Exception | None = None) -> None:
        self.asked: list[tuple[UUID, str | None, UUID | None]] = []
        self._fault = fault

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
        self.asked.append((tenant_id, end_user, request_id))
        if self._fault is not None:
            raise self._fault
        return 3


@asynccontextmanager
async def eraser_of(rig: Rig, *others: Erasable) -> AsyncIterator[Eraser]:
    redis = create_redis(rig.url, timeout_s=5.0)
    try:
        yield Eraser(redis, rig.data_keys, SystemClock(), others)
    finally:
        await redis.close()


async def listed(rig: Rig, tenant_id: UUID) -> set[UUID]:
    return {each.facts.request_id for each in (await rig.reader.page(tenant_id)).entries}


async def keys_left(engine: AsyncEngine, tenant_id: UUID) -> int:
    async with transaction(engine) as connection:
        count = select(func.count()).where(data_keys.c.tenant_id == tenant_id)
        return await connection.scalar(count) or 0


async def test_after_erasure_redis_own_files_hold_nothing_readable(
    engine: AsyncEngine, acme: UUID, globex: UUID, services_dir: Path
) -> None:
    redis = EmbeddedRedis(services_dir, durable=True)
    url = await asyncio.to_thread(redis.start)
    files = services_dir / "data"

    def dump() -> bytes:
        found = b"".join(path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file())
        assert {path.suffix for path in files.rglob("*") if path.is_file()} >= {".rdb", ".aof"}
        return found

    async with make_rig(url, engine) as rig, eraser_of(rig) as eraser:
        await rig.redis.command("CONFIG", "SET", "rdbcompression", "no")
        mine = [
            entry(acme, "Salammbo", model="model-words", tags=("tag-words",), backend="backend-words"),
            entry(acme, "Carthage", client_request_id="client-words", end_user=ANN, error_code="error-words"),
        ]
        theirs = entry(globex, "Hamilcar")
        await rig.write(*mine, theirs)
        await rig.reader.feedback(acme, mine[0].request_id, 1, "comment-words")
        stolen = (await rig.data_keys.keys([(acme, None), (acme, ANN)])).values()
        await rig.redis.command("SAVE")
        before = dump()
        # Never in the clear, not even before; yet it is there, for who has the keys.
        words = [b"Salammbo", b"Carthage", b"words", ANN.encode(), b"gateway", b"team-red", b"Hamilcar"]
        assert not any(word in before for word in words)
        assert opened_in(before, stolen, acme, mine[0].request_id, mine[1].request_id) == 2
        receipt = await eraser.tenant(acme)
        assert receipt.counts == {"logged_prompts": 2, "data_keys": 2}
        assert not receipt.unfinished
        assert await keys_left(engine, acme) == 0
        assert await rig.reader.entry(acme, mine[0].request_id) is None
        assert await names(rig, f"pl:{acme}:*") == {f"pl:{acme}:x:"}
        await rig.redis.command("SAVE")
        # What was written is in the append-only file still; the keys that would open it are nowhere.
        assert not any(word in dump() for word in words)
        assert opened_in(dump(), stolen, acme, mine[0].request_id, mine[1].request_id) == 2
        assert await rig.data_keys.living(acme, {key.id for key in stolen}) == set()
        dumped = (files / "dump.rdb").read_bytes()
        assert not any(key.id.bytes in dumped for key in stolen)
        assert (await rig.reader.entry(globex, theirs.request_id)) is not None
    redis.stop()


def opened_in(files: bytes, keys: Collection[DataKey], tenant_id: UUID, *request_ids: UUID) -> int:
    """How many entries' metadata the keys open, wherever in the files it is."""
    count = 0
    for key in keys:
        for request_id in request_ids:
            at = -1
            while (at := files.find(key.id.bytes, at + 1)) >= 0:
                if opens(files[at : at + 2000], key, tenant_id, request_id):
                    count += 1
                    break
    return count


def opens(data: bytes, key: DataKey, tenant_id: UUID, request_id: UUID) -> bool:
    # Its length stands before it in either file, in ways of their own: all are tried.
    for length in range(200, 700):
        with contextlib.suppress(Unreadable):
            unpack_metadata(data[:length], key, tenant_id, request_id)
            return True
    return False


async def test_an_end_user_s_history_goes_and_the_others_stays(rig: Rig, acme: UUID, engine: AsyncEngine) -> None:
    ann, bob, nobody = entry(acme, end_user=ANN), entry(acme, end_user=BOB), entry(acme)
    await rig.write(ann, bob, nobody, entry(acme, end_user=ANN))
    (row,) = await rig.store.rows(acme, count=1)
    room = Room()
    async with eraser_of(rig, room) as eraser:
        receipt = await eraser.end_user(acme, ANN)
    assert receipt.counts == {"logged_prompts": 2, "data_keys": 1, "cached_answers": 3}
    assert (receipt.scope, receipt.end_user) == ("end_user", ANN)
    assert room.asked == [(acme, ANN, None)]
    assert await listed(rig, acme) == {bob.request_id, nobody.request_id}
    key_id = key_id_of(row.metadata)
    assert key_id is not None
    assert await rig.data_keys.by_id(acme, key_id) is None
    counted, real = await account(rig, acme)
    assert counted == real
    again = entry(acme, end_user=ANN)
    await rig.write(again)
    assert again.request_id in await listed(rig, acme), "what she asks from now on is logged"


async def test_one_request_goes(rig: Rig, acme: UUID, globex: UUID) -> None:
    one, other = entry(acme), entry(acme)
    await rig.write(one, other)
    room = Room()
    async with eraser_of(rig, room) as eraser:
        assert (await eraser.request(globex, one.request_id)).counts["logged_prompts"] == 0
        assert await listed(rig, acme) == {one.request_id, other.request_id}
        receipt = await eraser.request(acme, one.request_id)
        assert receipt.counts == {"logged_prompts": 1, "cached_answers": 3}
        assert (await eraser.request(acme, uuid7())).counts["logged_prompts"] == 0
    assert room.asked[1] == (acme, None, one.request_id)
    assert await listed(rig, acme) == {other.request_id}
    assert not await names(rig, f"pl:{acme}:e:{one.request_id}")


@pytest.mark.parametrize("scope", ["tenant", "end_user", "request"])
async def test_what_was_admitted_before_and_comes_after_is_not_written(rig: Rig, acme: UUID, scope: str) -> None:
    late = entry(acme, end_user=ANN, admitted_at=datetime.now(UTC) - timedelta(minutes=5))
    beside = entry(acme, end_user=BOB, admitted_at=late.admitted_at)
    async with eraser_of(rig) as eraser:
        if scope == "tenant":
            await eraser.tenant(acme)
        elif scope == "end_user":
            await eraser.end_user(acme, ANN)
        else:
            await eraser.request(acme, late.request_id)
    new = entry(acme, end_user=ANN, admitted_at=datetime.now(UTC) + timedelta(seconds=1))
    await rig.write(late, beside, new)
    assert await listed(rig, acme) == {new.request_id} | (set() if scope == "tenant" else {beside.request_id})


async def test_what_another_replica_writes_by_an_erased_key_is_unreadable_and_goes_with_the_next(
    rig: Rig, acme: UUID, engine: AsyncEngine
) -> None:
    async with make_rig(rig.url, engine) as replica, eraser_of(rig) as eraser:
        await replica.write(entry(acme, end_user=ANN))
        await eraser.end_user(acme, ANN)
        stale = entry(acme, end_user=ANN, admitted_at=datetime.now(UTC) + timedelta(seconds=1))
        await replica.write(stale)
        assert len(await rig.store.rows(acme, count=10)) == 1
        assert await listed(rig, acme) == set()
        assert await rig.reader.entry(acme, stale.request_id) is None
        assert [line async for line in rig.reader.export(acme)] == []
        assert (await rig.reader.scan(acme, "France")).entries == []
        assert not await rig.reader.feedback(acme, stale.request_id, 1)
        receipt = await eraser.end_user(acme, BOB)
        assert receipt.counts == {"logged_prompts": 1, "data_keys": 0}
        assert await rig.store.rows(acme, count=10) == []


async def test_erasing_while_requests_are_logged_leaves_nothing_of_before(
    rig: Rig, acme: UUID, engine: AsyncEngine
) -> None:
    async with make_rig(rig.url, engine) as replica, eraser_of(rig) as eraser:
        midway = asyncio.Event()
        before: list[UUID] = []

        async def talk(to: Rig) -> None:
            for n in range(60):
                each = entry(acme, end_user=ANN)
                if not midway.is_set():
                    before.append(each.request_id)
                await to.write(each)
                if n == 20:
                    midway.set()

        async def erase() -> Receipt:
            await midway.wait()
            return await eraser.end_user(acme, ANN)

        _, _, receipt = await asyncio.gather(talk(rig), talk(replica), erase())
        assert receipt.counts["logged_prompts"] >= 21
        readable = {each.facts.request_id for each in (await rig.reader.page(acme, limit=500)).entries}
        assert readable
        assert not readable & set(before[:-1]), "one was perhaps admitted as the erasure began"
        rows = await rig.store.rows(acme, count=1000)
        living = await rig.data_keys.living(acme, {key_id_of(row.metadata) or acme for row in rows})
        assert {row.request_id for row in rows if key_id_of(row.metadata) in living} == readable
        assert len(rows) > len(readable), "the other replica did not know of it, for a while"


async def test_one_room_s_fault_keeps_no_other_from_being_erased(rig: Rig, acme: UUID, engine: AsyncEngine) -> None:
    await rig.write(entry(acme))
    broken, away, good = Room(ValueError("secret")), Room(RedisUnavailable("gone")), Room()
    broken.kind, away.kind = "stored_responses", "idempotency_answers"
    async with eraser_of(rig, broken, away, good) as eraser:
        receipt = await eraser.tenant(acme)
    assert receipt.counts["logged_prompts"] == 1
    assert receipt.counts["cached_answers"] == 3
    assert receipt.unfinished.keys() == {"stored_responses", "idempotency_answers"}
    assert "secret" not in receipt.unfinished["stored_responses"]
    assert await keys_left(engine, acme) == 0


async def test_a_redis_that_is_full_refuses_entries_and_still_lets_go_of_them(rig: Rig, acme: UUID) -> None:
    await rig.write(*(entry(acme, end_user=ANN) for _ in range(3)))
    await rig.redis.command("CONFIG", "SET", "maxmemory", "1")
    try:
        await rig.write(entry(acme))
        assert rig.lost == {"redis": 1}
        assert await rig.store.trim(acme, msgspec.structs.replace(FULL, max_bytes=2500)) == 1
        async with eraser_of(rig) as eraser:
            receipt = await eraser.end_user(acme, ANN)
        assert (receipt.counts["logged_prompts"], receipt.unfinished) == (2, {})
    finally:
        await rig.redis.command("CONFIG", "SET", "maxmemory", "0")


async def test_while_redis_is_away_the_key_goes_all_the_same(rig: Rig, acme: UUID, engine: AsyncEngine) -> None:
    await rig.write(entry(acme, response=answer("said")))
    (row,) = await rig.store.rows(acme, count=1)
    key = await rig.data_keys.key(acme)
    (sealed,) = await rig.store.bodies(acme, [row.request_id])
    assert sealed.response is not None
    assert b"said" in unpack_body(sealed.response, key, acme, row.request_id, "response")
    nowhere = create_redis("redis://127.0.0.1:1/0", timeout_s=0.2)
    receipt = await Eraser(nowhere, rig.data_keys, SystemClock()).tenant(acme)
    await nowhere.close()
    assert receipt.counts["data_keys"] == 1
    assert receipt.unfinished.keys() == {"logged_prompts"}
    assert await listed(rig, acme) == set()
    async with eraser_of(rig) as eraser:
        assert (await eraser.tenant(acme)).counts == {"logged_prompts": 1, "data_keys": 0}
    assert await rig.store.rows(acme, count=1) == []
