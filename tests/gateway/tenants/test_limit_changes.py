from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.tables import limits
from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory, LimitChange, LimitSpec
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.limit_changes import MAX_LIMITS
from gateway.tenants.records import ConfigurationError, UnknownKey, UnknownProject, VersionConflict
from gateway.tenants.specs import check_limit
from tests.gateway.db.support import ManualClock
from tests.gateway.tenants.support import ACTOR, budget, concurrent, requests_per_minute


async def test_a_limit_is_one_of_its_kind(directory: Directory) -> None:
    await directory.create_tenant(ACTOR, "acme")
    first = await directory.set_limit(ACTOR, "acme", budget(5))
    second = await directory.set_limit(ACTOR, "acme", budget(6), if_version=1)
    assert (second.id, second.amount, second.version) == (first.id, 6, 2)
    await directory.set_limit(ACTOR, "acme", budget(7, "day"))
    of_users = LimitSpec(subject="end_user", metric="budget", window="month", amount=8)
    await directory.set_limit(ACTOR, "acme", of_users)
    found = await directory.list_limits("acme")
    assert [(limit.subject, limit.window, limit.amount) for limit in found] == [
        ("end_user", "month", 8),
        ("tenant", "day", 7),
        ("tenant", "month", 6),
    ]
    assert await directory.limit("acme", first.id) == second
    assert await directory.delete_limit(ACTOR, "acme", first.id, if_version=2) == second
    assert len(await directory.list_limits("acme")) == 2


async def test_a_limit_is_changed_by_its_id_whatever_its_target(directory: Directory, secret_key: SecretKey) -> None:
    tenant = await directory.create_tenant(ACTOR, "acme")
    spec = LimitSpec(subject="end_user", target="alice", metric="budget", window="day", amount=5, thresholds=(50,))
    limit = await directory.set_limit(ACTOR, "acme", spec)
    assert limit.target == end_user_hash(secret_key, tenant.id, "alice")
    changed = await directory.update_limit(ACTOR, "acme", limit.id, LimitChange(amount=6), if_version=1)
    assert (changed.target, changed.amount, changed.thresholds) == (limit.target, 6, (50,))
    changed = await directory.update_limit(ACTOR, "acme", limit.id, LimitChange(hard=False, thresholds=(90, 10)))
    assert (changed.amount, changed.hard, changed.thresholds, changed.version) == (6, False, (10, 90), 3)
    with pytest.raises(VersionConflict):
        await directory.update_limit(ACTOR, "acme", limit.id, LimitChange(amount=7), if_version=1)
    with pytest.raises(ConfigurationError):
        await directory.update_limit(ACTOR, "acme", limit.id, LimitChange(amount=-1))


async def test_a_target_must_be_there_and_be_the_tenants_own(
    directory: Directory, engine: AsyncEngine, clock: ManualClock
) -> None:
    for name in ("acme", "globex"):
        await directory.create_tenant(ACTOR, name)
    web = await directory.create_project(ACTOR, "globex", "web")
    _, key = await directory.create_key(ACTOR, "globex", "k")

    def of(subject: Any, target: str) -> LimitSpec:
        return LimitSpec(subject=subject, target=target, metric="concurrent", amount=1)

    wrong: tuple[tuple[LimitSpec, type[Exception]], ...] = (
        (of("project", "web"), UnknownProject),
        (of("project", str(web.id)), UnknownProject),
        (of("key", key.public_id), UnknownKey),
        (of("model", "m"), ConfigurationError),
    )
    for spec, fault in wrong:
        with pytest.raises(fault):
            await directory.set_limit(ACTOR, "acme", spec)
    assert (await directory.set_limit(ACTOR, "globex", of("project", str(web.id)))).target == str(web.id)
    with pytest.raises(ConfigurationError, match="PENSTOCK_SECRET_KEY"):
        await Directory(engine, clock).set_limit(ACTOR, "acme", of("end_user", "alice"))
    assert await directory.list_limits("acme") == []


async def test_a_tenant_has_so_many_limits_at_most(directory: Directory, engine: AsyncEngine) -> None:
    tenant = await directory.create_tenant(ACTOR, "acme", limits=[budget(1)])
    full = [
        {
            "id": uuid7(),
            "tenant_id": tenant.id,
            "subject": "end_user",
            "target": f"{number:032x}",
            "metric": "concurrent",
            "window": "",
            "amount": 1,
        }
        for number in range(MAX_LIMITS - 1)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(limits), full)
    with pytest.raises(ConfigurationError, match="1000 limits already"):
        await directory.set_limit(ACTOR, "acme", concurrent(1))
    await directory.set_limit(ACTOR, "acme", budget(2))
    await directory.delete_limit(ACTOR, "acme", full[0]["id"])  # type: ignore[arg-type]
    await directory.set_limit(ACTOR, "acme", concurrent(1))


WRONG: tuple[dict[str, Any], ...] = (
    {"metric": "requests", "amount": 1},
    {"metric": "requests", "window": "month", "amount": 1},
    {"metric": "tokens", "window": "total", "amount": 1},
    {"metric": "concurrent", "window": "minute", "amount": 1},
    {"metric": "budget", "amount": 1},
    {"metric": "budget", "window": "hour", "amount": 1},
    {"metric": "budget", "window": "year", "amount": 1},
    {"metric": "shoes", "window": "day", "amount": 1},
    {"metric": "budget", "window": "day", "amount": -1},
    {"metric": "budget", "window": "day", "amount": 2**53},
    {"metric": "requests", "window": "day", "amount": 2**31},
    {"metric": "tokens", "window": "day", "amount": 10**12 + 1},
    {"metric": "concurrent", "amount": 1, "target": "x"},
    {"metric": "concurrent", "amount": 1, "subject": "project"},
    {"metric": "concurrent", "amount": 1, "subject": "key", "target": "a\x00b"},
    {"metric": "concurrent", "amount": 1, "subject": "world", "target": "x"},
    {"metric": "concurrent", "amount": 1, "subject": "end_user", "target": "x" * 1001},
    {"metric": "tokens", "window": "day", "amount": 1, "thresholds": (80,)},
    {"metric": "budget", "window": "day", "amount": 1, "thresholds": (0,)},
    {"metric": "budget", "window": "day", "amount": 1, "thresholds": (1001,)},
    {"metric": "budget", "window": "day", "amount": 1, "thresholds": tuple(range(1, 22))},
)


@pytest.mark.parametrize("values", WRONG)
def test_limits_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        check_limit(LimitSpec(**values))


async def test_refused_limits_leave_nothing(directory: Directory) -> None:
    with pytest.raises(ConfigurationError):
        await directory.create_tenant(ACTOR, "acme", limits=[requests_per_minute(1), budget(-1)])
    assert await directory.list_tenants() == []


@given(st.text(max_size=20), st.sampled_from(["project", "key", "model", "end_user", "tenant"]))
def test_any_target_is_good_or_clearly_refused(target: str, subject: Any) -> None:
    try:
        check_limit(LimitSpec(subject=subject, target=target, metric="concurrent", amount=1))
    except ConfigurationError as fault:
        assert str(fault)
