"""The doors that report, without the rest of a gateway, over a ledger full of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from litestar import Litestar
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.reports import end_user_hasher
from gateway.billing.usage import UsageEvent
from gateway.clock import Clock
from gateway.db.engine import transaction
from gateway.db.tables import api_keys, tenants
from gateway.http.errors import EXCEPTION_HANDLERS
from gateway.http.invoices import invoice_handlers
from gateway.http.tenant_usage import tenant_usage_handlers
from gateway.http.usage import usage_handlers
from gateway.secret_key import SecretKey
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.keys import generate_key
from gateway.tenants.service import Tenants
from tests.gateway.billing.report_support import TENANTS, many_events, name_tenants, project_of, write

SECRET_KEY = "secret-key-of-the-tests-of-reports"
ACME, BOLT = TENANTS[:2]
ALICE = end_user_hash(SecretKey(SECRET_KEY), ACME, "alice")


@dataclass(frozen=True)
class Door:
    app: Litestar
    client: httpx.AsyncClient
    events: list[UsageEvent]
    keys: dict[str, str]

    async def get(self, path: str, caller: str | None = "viewer", /, **parameters: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.get(caller, caller)}"} if caller else {}
        accept = parameters.pop("accept", None)
        return await self.client.get(
            path, params=parameters or None, headers=headers | ({"accept": accept} if accept else {})
        )

    async def data(self, path: str, caller: str = "viewer", /, **parameters: Any) -> list[dict[str, Any]]:
        answer = await self.get(path, caller, **parameters)
        assert answer.status_code == 200, answer.text
        rows: list[dict[str, Any]] = answer.json()["data"]
        return rows

    def of(self, tenant: UUID) -> list[UsageEvent]:
        return [event for event in self.events if event.tenant_id == tenant]


async def _keys(engine: AsyncEngine) -> dict[str, str]:
    """Of ``acme`` one that reads usage and one that does not; of ``bolt`` one that reads; of two admins."""
    keys = {}
    async with transaction(engine) as connection:
        for name, tenant, scopes in (
            ("acme", ACME, ["usage:read"]),
            ("acme-inference", ACME, ["inference"]),
            ("bolt", BOLT, ["usage:read"]),
            ("viewer", None, ["admin"]),
            ("owner", None, ["admin"]),
        ):
            new = generate_key()
            keys[name] = new.text
            await connection.execute(
                insert(api_keys).values(
                    public_id=new.public_id,
                    tenant_id=tenant,
                    project_id=project_of(tenant, 1) if tenant else None,
                    role=None if tenant else name,
                    name=name,
                    secret_sha256=new.secret_sha256,
                    scopes=scopes,
                )
            )
    return keys


@asynccontextmanager
async def report_door(engine: AsyncEngine, clock: Clock, events: list[UsageEvent] | None = None) -> AsyncIterator[Door]:
    """Tenants ``acme``, whose zone is Berlin's, and ``bolt``, and a third without a name."""
    events = many_events(200) if events is None else events
    await name_tenants(engine, {ACME: "acme", BOLT: "bolt"})
    await write(engine, events)
    async with transaction(engine) as connection:
        await connection.execute(update(tenants).where(tenants.c.id == ACME).values(timezone="Europe/Berlin"))
    keys = await _keys(engine)
    callers, hasher = Tenants(engine, clock), end_user_hasher(SECRET_KEY)
    app = Litestar(
        route_handlers=[
            *usage_handlers(callers, engine, hasher),
            *tenant_usage_handlers(callers, engine, hasher),
            *invoice_handlers(callers, engine, clock),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        logging_config=None,
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield Door(app, client, events, keys)
