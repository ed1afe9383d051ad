"""Trimming: exact by age and by bytes, no bodies left behind, and what is counted is what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from uuid import UUID

import msgspec
import pytest

from gateway.admission.redis import create_redis
from gateway.db.engine import DatabaseUnavailable
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog import store as store_module
from gateway.promptlog.retention import Retention
from gateway.promptlog.store import SLACK, TENANTS
from tests.gateway.promptlog.support import FULL, Rig, account, entry, hash_of, names

DAY_MS = 24 * 3600 * 1000
POLICY = msgspec.structs.replace(FULL, retention_days=7)


def policy(**changes: object) -> PromptLogPolicy:
    return msgspec.structs.replace(POLICY, **changes)


async def moved(rig: Rig, days: float) -> None:
    """Let Redis' clock be so far ahead for the scripts, of whichever connection."""
    for redis in (rig.redis, rig.log._redis):
        redis.time_offset_ms = round(days * DAY_MS)


@asynccontextmanager
async def sweeping(rig: Rig, policies: Mapping[UUID, PromptLogPolicy]) -> AsyncIterator[Retention]:
    async def told() -> Mapping[UUID, PromptLogPolicy]:
        return policies

    redis = create_redis(rig.url, timeout_s=5.0)
    redis.time_offset_ms = rig.redis.time_offset_ms
    try:
        yield Retention(redis, told)
    finally:
        await redis.close()


async def whole(rig: Rig, tenant_id: UUID) -> list[UUID]:
    """What is there, oldest first; no body stands without its entry, no entry without its body, and all is counted."""
    rows = await rig.store.rows(tenant_id, count=10_000, newest_first=False)
    found = [row.request_id for row in rows]
    assert {name.rpartition(":")[2] for name in await names(rig, f"pl:{tenant_id}:e:*")} == set(map(str, found))
    counted, real = await account(rig, tenant_id)
    assert counted == real
    if not found:
        assert not await names(rig, f"pl:{tenant_id}:*")
    return found


async def write_days(rig: Rig, tenant_id: UUID, days: int) -> list[UUID]:
    """One entry a day."""
    written = []
    for day in range(days):
        await moved(rig, day)
        each = entry(tenant_id, admitted_at=datetime.now(UTC))
        await rig.write(each, policy=policy(retention_days=3650))
        written.append(each.request_id)
    return written


async def test_writing_trims_by_age(rig: Rig, acme: UUID) -> None:
    written = await write_days(rig, acme, 10)
    await moved(rig, 12.5)
    last = entry(acme)
    await rig.write(last, policy=POLICY)
    assert await whole(rig, acme) == [*written[6:], last.request_id]


async def test_writing_trims_by_bytes(rig: Rig, acme: UUID) -> None:
    given = [entry(acme, f"{n:03}") for n in range(20)]
    await rig.write(given[0])
    size, _ = await account(rig, acme)
    for each in given[1:]:
        await rig.write(each, policy=policy(max_bytes=size * 5 + 20))
    assert await whole(rig, acme) == [each.request_id for each in given[15:]]
    await rig.write(entry(acme), policy=policy(max_bytes=10))
    assert await whole(rig, acme) == []


@pytest.mark.parametrize("seed", range(3))
async def test_bytes_add_up_whatever_happens(rig: Rig, acme: UUID, seed: int) -> None:
    random = Random(seed)
    limit = policy(max_bytes=30_000)
    there: list[UUID] = []
    async with sweeping(rig, {acme: limit}) as retention:
        for _ in range(25):
            kind = random.choice(["write", "write", "write", "feedback", "remove", "evict", "sweep"])
            if kind == "write":
                given = [entry(acme, "x" * random.randrange(3000), response=random.randbytes(random.randrange(2000)))]
                await rig.write(*given * random.randrange(1, 3), policy=limit)
            elif kind == "feedback" and there:
                await rig.reader.feedback(acme, random.choice(there), 1, "x" * random.randrange(300))
            elif kind == "remove" and there:
                row = await rig.store.row(acme, random.choice(there))
                assert row is not None
                assert await rig.store.remove(acme, [row.place]) == 1
            elif kind == "evict":
                await rig.redis.command("DEL", f"pl:{acme}:account")
                await rig.write(entry(acme), policy=limit)
            await retention.sweep()
            there = await whole(rig, acme)
            assert await rig.store.bytes_of(acme) <= 30_000


async def test_a_sweep_reaches_logs_into_which_nothing_comes(rig: Rig, acme: UUID, globex: UUID) -> None:
    for tenant_id in (acme, globex):
        await write_days(rig, tenant_id, 3)
    await moved(rig, 8.5)
    async with sweeping(rig, {acme: POLICY}) as retention:
        assert await retention.sweep() == 2
        assert (len(await whole(rig, acme)), len(await whole(rig, globex))) == (1, 3)
    await moved(rig, 20)
    async with sweeping(rig, {acme: POLICY, globex: policy(level="off")}) as retention:
        assert await retention.sweep() == 4
    assert (await whole(rig, acme), await whole(rig, globex)) == ([], [])
    assert await rig.redis.command("EXISTS", TENANTS) == 0


async def test_a_lower_limit_holds_from_the_next_sweep_on_in_bounded_steps(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TRIMMED_A_CALL", 7)
    given = [entry(acme, f"{n:03}") for n in range(40)]
    await rig.write(*given)
    size, _ = await account(rig, acme)
    async with sweeping(rig, {acme: policy(max_bytes=size // 4 + 300)}) as retention:
        assert await retention.sweep() == 30
        assert await whole(rig, acme) == [each.request_id for each in given[30:]]
        assert await retention.sweep() == 0


async def test_keys_expire_by_themselves_and_by_the_retention_that_holds(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TRIMMED_A_CALL", 4)
    given = [entry(acme) for _ in range(10)]
    await rig.write(*given, policy=POLICY)
    keys = [f"pl:{acme}:{name}" for name in ("log", "account", *(f"e:{each.request_id}" for each in given))]

    async def ends() -> set[int]:
        """Days from now, to the hundredth; an hour is 0.04."""
        now = datetime.now(UTC).timestamp() * 1000
        return {round((await rig.redis.command("PEXPIRETIME", key) - now) / DAY_MS * 100) for key in keys}

    hour = round(SLACK / timedelta(days=1) * 100)
    assert await ends() == {700 + hour}
    for days in (30, 2):
        async with sweeping(rig, {acme: policy(retention_days=days)}) as retention:
            await retention.sweep()
            assert await ends() == {days * 100 + hour}
            assert len(await whole(rig, acme)) == 10


async def test_an_evicted_account_is_counted_anew_in_bounded_steps(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TRIMMED_A_CALL", 4)
    given = [entry(acme, f"{n:03}") for n in range(18)]
    await rig.write(*given[:16])
    _, real = await account(rig, acme)
    await rig.redis.command("DEL", f"pl:{acme}:account")
    await rig.write(*given[16:])
    counted, real = await account(rig, acme)
    assert 0 < counted < real, "what came since is counted at once"
    row = await rig.store.row(acme, given[3].request_id)
    assert row is not None
    await rig.store.remove(acme, [row.place])
    async with sweeping(rig, {acme: POLICY}) as retention:
        assert await retention.sweep() == 0
    assert len(await whole(rig, acme)) == 17


async def test_bodies_whose_log_was_evicted_are_found(rig: Rig, acme: UUID, globex: UUID) -> None:
    await rig.write(entry(acme), entry(acme), entry(globex))
    await rig.redis.command("DEL", f"pl:{acme}:log")
    kept = entry(acme)
    await rig.write(kept)
    assert await rig.store.remove_orphans(acme) == 2
    assert [row.request_id for row in await rig.store.rows(acme, count=10)] == [kept.request_id]
    assert await hash_of(rig, acme, kept.request_id)
    assert len(await whole(rig, globex)) == 1


async def test_it_sweeps_by_itself_and_outlives_outages(rig: Rig, acme: UUID) -> None:
    await write_days(rig, acme, 1)
    swept = asyncio.Event()
    times = 0

    async def policies() -> Mapping[UUID, PromptLogPolicy]:
        nonlocal times
        times += 1
        if times == 1:
            raise DatabaseUnavailable("away")
        if times == 4:
            swept.set()
        return {acme: policy(max_bytes=1)}

    async with Retention(create_redis(rig.url, timeout_s=5.0), policies, interval_s=0.001):
        async with asyncio.timeout(10):
            await swept.wait()
    assert await whole(rig, acme) == []
