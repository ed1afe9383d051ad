"""Tenants in a database, and keys for them."""

from __future__ import annotations

from uuid import UUID, uuid4

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.datakeys.master_keys import MasterKeys
from gateway.db.engine import transaction
from gateway.db.tables import tenants
from gateway.secret_key import SecretKey

OLD = SecretKey("the-old-master-key-of-these-tests-01")
NEW = SecretKey("the-new-master-key-of-these-tests-02")
MASTER_KEYS = MasterKeys(OLD)


async def tenant(engine: AsyncEngine, name: str = "acme") -> UUID:
    tenant_id = uuid4()
    async with transaction(engine) as connection:
        await connection.execute(insert(tenants).values(id=tenant_id, name=name, salt="s"))
    return tenant_id
