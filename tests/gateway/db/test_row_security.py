"""Row-level security: what is read on a tenant's behalf shows that tenant's rows alone, whatever the query forgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db.engine import tenant_transaction, transaction
from gateway.db.partitions import partition_ddl
from gateway.ids import uuid7
from tests.gateway.db.support import opened

ACME, GLOBEX = uuid7(), uuid7()
NOW = datetime(2026, 5, 5, tzinfo=UTC)
# A row of each table, of the tenant :t. What a tenant may read is here, or the test of it fails.
ROWS = {
    "tenants": "(id, name, salt) VALUES (:t, :name, 's')",
    "projects": "(id, tenant_id, name) VALUES (:t, :t, 'default')",
    "api_keys": "(public_id, tenant_id, project_id, name, secret_sha256, scopes) "
    "VALUES (:name, :t, :t, 'k', sha256('x'), '{inference}')",
    "stored_responses": "(tenant_id, id, project_id, sealed, expires_at) VALUES (:t, 'resp_1', :t, 'x', now())",
    "data_keys": "(id, tenant_id, wrapped, master_id) VALUES (:t, :t, 'x', 'm')",
    "limits": "(id, tenant_id, subject, metric, \"window\", amount) VALUES (:t, :t, 'tenant', 'concurrent', '', 1)",
    "prices": "(id, route, tenant_id, input_usd_per_mtok, output_usd_per_mtok, effective_from) "
    "VALUES (:t, 'm', :t, 1, 1, :now)",
    "usage_events": "(request_id, admitted_at, revision, tenant_id, project_id, key_id, route, status, prompt_tokens, "
    "completion_tokens, cached_tokens, usage_source, charged_nano_usd, cost_nano_usd, over_bound, streamed, attempts) "
    "VALUES (:t, :now, 1, :t, :t, 'k', 'm', 'ok', 1, 1, 0, 'backend', 1, 1, false, false, 1)",
    "usage_rollup": "VALUES (:now, :t, :t, 'k', 'm', '', 'ok', 1, 1, 1, 0, 0, 0, 0, 0, 1, 1)",
    "refusals": "VALUES (:now, :t, 'k', 'requests', 1)",
    "audit_log": "(id, actor, action, kind, target, tenant_id) VALUES (:t, 'a', 'create', 'tenant', 'x', :t)",
    "alerts": "(id, tenant_id, limit_id, period_start, threshold, spent_nano_usd, amount_nano_usd, subject, target, "
    "\"window\", crossed_at) VALUES (:t, :t, :t, :now, 80, 1, 1, 'tenant', '', 'day', :now)",
}
UNREADABLE = {"audit_log", "data_keys"}
"""Of which tenants may read nothing at all."""


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """Two tenants, each with a row in every table."""
    async with opened(database_url) as engine:
        async with transaction(engine) as connection:
            await connection.execute(text("INSERT INTO pools VALUES ('p')"))
            await connection.execute(
                text(
                    "INSERT INTO routes (name, pool, backend_model, context_length, default_output_tokens, "
                    "max_output_tokens, timeout_s) VALUES ('m', 'p', 'm', 9, 1, 1, 1)"
                )
            )
            await connection.execute(text(partition_ddl(NOW)))
            for table, values in ROWS.items():
                for tenant_id, name in ((ACME, "acme"), (GLOBEX, "globex")):
                    given = {"t": tenant_id, "name": name, "now": NOW}
                    statement = text(f"INSERT INTO {table} {values}")
                    await connection.execute(statement, {k: v for k, v in given.items() if f":{k}" in values})
            await connection.execute(
                text(
                    "INSERT INTO prices (id, route, input_usd_per_mtok, output_usd_per_mtok, effective_from) "
                    "VALUES (gen_random_uuid(), 'm', 1, 1, now())"
                )
            )
        yield engine


async def _tables_of_tenants(engine: AsyncEngine) -> set[str]:
    """Every table and partitioned table whose rows name a tenant, as the database itself has them."""
    query = text(
        "SELECT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attname = 'tenant_id' "
        "WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace = 'public'::regnamespace"
    )
    async with transaction(engine) as connection:
        return {*(await connection.scalars(query)), "tenants"}


async def _owners(connection: AsyncConnection, table: str) -> set[UUID | None]:
    column = "id" if table == "tenants" else "tenant_id"
    return set(await connection.scalars(text(f"SELECT {column} FROM {table}")))


async def test_a_query_without_a_filter_shows_own_rows_alone(engine: AsyncEngine) -> None:
    tables = await _tables_of_tenants(engine)
    assert {"usage_events", "limits"} <= tables
    for table in tables:
        assert table in ROWS, f"give {table} a policy in its migration, and a row here"
        async with transaction(engine) as connection:
            assert {ACME, GLOBEX} <= await _owners(connection, table)
        if table in UNREADABLE:
            with pytest.raises(ProgrammingError, match="permission denied"):
                async with tenant_transaction(engine, ACME) as connection:
                    await _owners(connection, table)
            continue
        for tenant_id in (ACME, GLOBEX):
            async with tenant_transaction(engine, tenant_id) as connection:
                shared = {None} if table == "prices" else set()
                assert await _owners(connection, table) == {tenant_id} | shared, table


async def test_what_backends_cost_us_is_no_price_of_tenants(engine: AsyncEngine) -> None:
    async with transaction(engine) as connection:
        await connection.execute(
            text(
                "INSERT INTO prices (id, route, basis, input_usd_per_mtok, output_usd_per_mtok, effective_from) "
                "VALUES (gen_random_uuid(), 'm', 'cost', 1, 1, now())"
            )
        )
        assert set(await connection.scalars(text("SELECT basis FROM prices"))) == {"charge", "cost"}
    async with tenant_transaction(engine, ACME) as connection:
        assert set(await connection.scalars(text("SELECT basis FROM prices"))) == {"charge"}


async def test_without_a_tenant_there_is_nothing(engine: AsyncEngine) -> None:
    for unset in ("RESET penstock.tenant_id", "SET LOCAL penstock.tenant_id = ''"):
        for table in await _tables_of_tenants(engine) - UNREADABLE - {"prices"}:
            async with transaction(engine) as connection:
                await connection.execute(text(unset))
                await connection.execute(text("SET LOCAL ROLE penstock_tenant"))
                assert await _owners(connection, table) == set(), table


async def test_a_tenant_that_is_not_there_sees_nothing(engine: AsyncEngine) -> None:
    async with tenant_transaction(engine, uuid7()) as connection:
        assert await _owners(connection, "usage_events") == set()


async def test_partitions_are_read_through_their_table_alone(engine: AsyncEngine) -> None:
    async with tenant_transaction(engine, ACME) as connection:
        assert await connection.scalar(text("SELECT count(*) FROM usage_events")) == 1
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with tenant_transaction(engine, ACME) as connection:
            await connection.execute(text("SELECT * FROM usage_events_2026_05"))


async def test_neither_secrets_nor_writing_are_granted(engine: AsyncEngine) -> None:
    for query in (
        "SELECT salt FROM tenants",
        "SELECT webhook_secret FROM tenants",
        "SELECT secret_sha256 FROM api_keys",
        "SELECT previous_secret_sha256 FROM api_keys",
        "SELECT * FROM dead_usage_events",
        "DELETE FROM usage_events",
        "UPDATE limits SET amount = 1",
        "CREATE TABLE x (y integer)",
    ):
        with pytest.raises(Exception, match=r"permission denied|read-only"):
            async with tenant_transaction(engine, ACME) as connection:
                await connection.execute(text(query))


async def test_the_next_transaction_of_the_connection_is_nobodys(database_url: str, engine: AsyncEngine) -> None:
    async with opened(database_url, pool_size=1) as single:
        async with tenant_transaction(single, ACME):
            pass
        async with transaction(single) as connection:
            assert await _owners(connection, "tenants") == {ACME, GLOBEX}
            await connection.execute(text("UPDATE limits SET amount = 2"))
