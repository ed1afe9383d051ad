"""What tenants, projects and routes say of the answer cache and the prompt log: stored, merged, audited."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import SystemClock
from gateway.db.engine import transaction
from gateway.db.tables import audit_log
from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, CustomPattern, PromptLogPolicy
from gateway.routing.route import new_route
from gateway.tenants.catalog import Catalog, RouteChange
from gateway.tenants.directory import Directory
from gateway.tenants.records import ConfigurationError
from gateway.tenants.service import Tenants
from gateway.tenants.specs import TenantChange, TenantSettings
from tests.gateway.tenants.support import ACTOR

CACHE = CachePolicy(mode="semantic", ttl_s=60, threshold=0.0)
LOG = PromptLogPolicy(level="redacted", patterns=(CustomPattern("employee", r"E-\d{6}"),))


async def test_a_tenants_policies_reach_its_principals(engine: AsyncEngine) -> None:
    clock = SystemClock()
    directory, tenants = Directory(engine, clock), Tenants(engine, clock, cache_s=0)
    record = await directory.create_tenant(ACTOR, "acme")
    assert (record.answer_cache, record.prompt_log) == (NO_POLICY, NO_LOG)
    key, _ = await directory.create_key(ACTOR, "acme", "k")
    record = await directory.update_tenant(ACTOR, "acme", TenantChange(answer_cache=CACHE, prompt_log=LOG))
    assert (record.answer_cache, record.prompt_log) == (CACHE, LOG)
    assert await directory.tenant("acme") == record
    await directory.update_project(ACTOR, "acme", "default", answer_cache=CachePolicy(mode="exact"))
    principal = await tenants.authenticate(key)
    assert principal.answer_cache == CachePolicy(mode="exact", ttl_s=60, threshold=0.0)
    assert principal.prompt_log == LOG
    assert principal.generation == record.generation + 1
    async with transaction(engine) as connection:
        entries = [
            (row.action, row.kind, row.after.get("answer_cache"))
            for row in await connection.execute(select(audit_log).where(audit_log.c.action == "update"))
        ]
    assert entries == [
        ("update", "tenant", {"mode": "semantic", "ttl_s": 60, "threshold": 0.0}),
        ("update", "project", {"mode": "exact"}),
    ]


async def test_a_routes_policy_is_read_with_it(engine: AsyncEngine) -> None:
    catalog = Catalog(engine, SystemClock(), cache_s=0)
    await catalog.create_pool(ACTOR, "p")
    await catalog.create_route(ACTOR, new_route("m", pool="p", context_length=100, answer_cache=CACHE))
    assert (await catalog.stored_route("m")).answer_cache == CACHE
    changed = await catalog.update_route(ACTOR, "m", RouteChange(answer_cache=CachePolicy(mode="off")))
    assert changed.version == 2
    route = await catalog.route("m")
    assert route is not None
    assert route.answer_cache == CachePolicy(mode="off")


@pytest.mark.parametrize(
    "change",
    [
        TenantChange(answer_cache=CachePolicy(ttl_s=0)),
        TenantChange(prompt_log=PromptLogPolicy(retention_days=0)),
        TenantChange(prompt_log=PromptLogPolicy(patterns=(CustomPattern("open", r"(E-\d{6}"),))),
    ],
)
async def test_what_cannot_be_is_refused_and_nothing_changes(engine: AsyncEngine, change: TenantChange) -> None:
    directory = Directory(engine, SystemClock())
    before = await directory.create_tenant(ACTOR, "acme", settings=TenantSettings(answer_cache=CACHE))
    with pytest.raises(ConfigurationError, match=r"answer_cache|prompt_log"):
        await directory.update_tenant(ACTOR, "acme", change)
    assert await directory.tenant("acme") == before


async def test_what_a_tenants_answers_may_take_is_for_the_tenant_to_say(engine: AsyncEngine) -> None:
    directory, catalog = Directory(engine, SystemClock()), Catalog(engine, SystemClock())
    policy = CachePolicy(max_tenant_bytes=1000)
    await directory.create_tenant(ACTOR, "acme", settings=TenantSettings(answer_cache=policy))
    with pytest.raises(ConfigurationError, match="max_tenant_bytes"):
        await directory.update_project(ACTOR, "acme", "default", answer_cache=policy)
    await catalog.create_pool(ACTOR, "p")
    with pytest.raises(ConfigurationError, match="max_tenant_bytes"):
        await catalog.create_route(ACTOR, new_route("m", pool="p", context_length=100, answer_cache=policy))
