from decimal import Decimal

import psycopg

from gateway.billing.prices import PriceBook
from gateway.clock import SystemClock
from gateway.db.engine import create_engine
from gateway.local.files import Credentials
from gateway.local.seed import MODEL, TENANT, seed
from gateway.tenants.catalog import Catalog
from gateway.tenants.service import Tenants


async def test_the_first_start_declares_a_priced_route_and_keys_that_work(database_url: str) -> None:
    credentials = await seed(database_url, None)
    engine = create_engine(database_url)
    try:
        tenants, catalog = Tenants(engine, SystemClock()), Catalog(engine, SystemClock())
        principal = await tenants.authenticate(credentials.tenant_key)
        assert principal.tenant_name == TENANT
        assert "inference" in principal.scopes
        await tenants.authenticate_admin(credentials.admin_key)
        route = await catalog.route(MODEL)
        assert route is not None
        assert route.backend_model == MODEL
        price = await PriceBook(engine, SystemClock()).price(MODEL, SystemClock().now())
        assert price is not None
        assert (price.input_usd_per_mtok, price.output_usd_per_mtok) == (Decimal("0.1"), Decimal("0.4"))
    finally:
        await engine.dispose()


async def test_a_later_start_changes_nothing(database_url: str) -> None:
    first = await seed(database_url, None)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE routes SET max_output_tokens = 100, default_output_tokens = 10")
    assert await seed(database_url, first) == first
    with psycopg.connect(database_url) as connection:
        count = "SELECT (SELECT count(*) FROM tenants), (SELECT count(*) FROM api_keys), (SELECT count(*) FROM prices)"
        assert connection.execute(count).fetchone() == (1, 2, 1)
        assert connection.execute("SELECT max_output_tokens FROM routes").fetchone() == (100,)


async def test_keys_that_the_database_does_not_know_are_replaced(database_url: str) -> None:
    first = await seed(database_url, None)
    foreign = Credentials("sk-penstock-" + "a" * 12 + "-" + "b" * 43, first.admin_key)
    second = await seed(database_url, foreign)
    assert second.tenant_key not in (foreign.tenant_key, first.tenant_key)
    assert second.admin_key == first.admin_key
