"""What the local set-up declares the first time: a pool, a route with a price, a tenant with a key, an admin's key.

What is there already stays as it is, so changes that its user made survive a restart.
"""

from __future__ import annotations

import contextlib
from decimal import Decimal

from gateway.billing.price_spec import PriceSpec
from gateway.billing.prices import PriceBook
from gateway.clock import Clock, SystemClock
from gateway.db.engine import create_engine
from gateway.local.files import Credentials
from gateway.routing.route import Route
from gateway.tenants.audit import Actor
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory
from gateway.tenants.records import InvalidKey, TenantExists
from gateway.tenants.service import Tenants

MODEL = "smollm2-135m-instruct"
POOL = "smollm2"
TENANT = "demo"
_ROUTE = Route(
    name=MODEL,
    pool=POOL,
    backend_model=MODEL,
    context_length=8192,
    default_output_tokens=512,
    max_output_tokens=8192,
    timeout_s=300.0,
    tokenizer="backend",
)
_PRICE = PriceSpec(route=MODEL, input_usd_per_mtok=Decimal("0.10"), output_usd_per_mtok=Decimal("0.40"))


async def seed(database_url: str, kept: Credentials | None, clock: Clock | None = None) -> Credentials:
    """Declare what is missing in a migrated database. ``kept``: keys of an earlier start; one that is not valid in this
    database, since it is another or the key was revoked, is replaced. Raises DatabaseUnavailable."""
    clock = clock or SystemClock()
    engine = create_engine(database_url)
    try:
        await _declare_model(Catalog(engine, clock), PriceBook(engine, clock), clock)
        return await _issue_keys(Tenants(engine, clock), Directory(engine, clock), kept)
    finally:
        await engine.dispose()


async def _declare_model(catalog: Catalog, prices: PriceBook, clock: Clock) -> None:
    actor = Actor.at_console()
    await catalog.create_pool(actor, POOL)
    if await catalog.route(MODEL) is None:
        await catalog.create_route(actor, _ROUTE)
    if await prices.price(MODEL, clock.now()) is None:
        await prices.set_price(actor, _PRICE)


async def _issue_keys(tenants: Tenants, directory: Directory, kept: Credentials | None) -> Credentials:
    actor = Actor.at_console()
    with contextlib.suppress(TenantExists):
        await directory.create_tenant(actor, TENANT)
    tenant_key = kept.tenant_key if kept else None
    try:
        await tenants.authenticate(tenant_key)
    except InvalidKey:
        tenant_key, _ = await directory.create_key(
            actor, TENANT, "local", scopes={"inference", "prompts:read", "usage:read"}
        )
    admin_key = kept.admin_key if kept else None
    try:
        await tenants.authenticate_admin(admin_key)
    except InvalidKey:
        admin_key, _ = await directory.create_admin_key(actor, "local")
    assert tenant_key is not None
    assert admin_key is not None
    return Credentials(tenant_key, admin_key)
