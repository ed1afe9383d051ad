"""What the rooms read of tenants' policies."""

from __future__ import annotations

from sqlalchemy import update

from gateway.clock import SystemClock
from gateway.db.tables import tenants
from gateway.memory_rooms import MemoryRooms
from gateway.observability.metrics import Metrics
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.secret_key import SecretKey
from gateway.settings import Settings
from tests.gateway.datakeys.support import tenant
from tests.gateway.db.support import opened

SECRET = "secret-key-of-the-tests-of-these-rooms"


async def test_a_policy_of_a_later_release_costs_no_other_tenant_its_retention(
    database_url: str, redis_url: str
) -> None:
    settings = Settings(database_url=database_url, redis_url=redis_url, secret_key=SECRET, cache_redis_url=None)
    async with opened(database_url, pool_size=2) as engine:
        newer, plain = await tenant(engine, "newer"), await tenant(engine, "plain")
        async with engine.begin() as connection:
            for tenant_id, policy in ((newer, {"level": "full", "colour": "blue"}), (plain, {"retention_days": 3})):
                await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(prompt_log=policy))
        rooms = MemoryRooms(settings, engine, SecretKey(SECRET), SystemClock(), Metrics())
        try:
            assert await rooms._policies() == {plain: PromptLogPolicy(retention_days=3)}
        finally:
            async with rooms:
                pass
