"""What single migrations make of the data that they find."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from click.testing import CliRunner
from sqlalchemy.engine import make_url

from gateway.cli import cli
from gateway.clock import SystemClock
from gateway.db.migrate import MIGRATIONS, upgrade
from gateway.local.services import EmbeddedPostgres
from gateway.routing.route import Route, Target
from gateway.tenants.catalog import Catalog
from tests.gateway.db.support import opened

ACME, GLOBEX, QUIET = uuid4(), uuid4(), uuid4()


def _rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


def test_limits_of_columns_become_rows_and_columns_again(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(empty_database_url, "0002")
    with psycopg.connect(empty_database_url) as connection:
        connection.cursor().executemany(
            "INSERT INTO tenants (id, name, salt, requests_per_minute, max_concurrent) VALUES (%s, %s, 's', %s, %s)",
            [(ACME, "acme", 60, 0), (GLOBEX, "globex", None, 4), (QUIET, "quiet", None, None)],
        )
        connection.cursor().executemany(
            "INSERT INTO budgets (tenant_id, amount_nano_usd, period, timezone) VALUES (%s, %s, %s, %s)",
            [(ACME, 2**53 - 1, "month", "Europe/Berlin"), (GLOBEX, 0, "total", "UTC")],
        )
    upgrade(empty_database_url)
    found = "SELECT tenant_id, metric, \"window\", amount FROM limits WHERE subject = 'tenant' AND target = '' AND hard"
    assert set(_rows(empty_database_url, found)) == {
        (ACME, "requests", "minute", 60),
        (ACME, "concurrent", "", 0),
        (ACME, "budget", "month", 2**53 - 1),
        (GLOBEX, "concurrent", "", 4),
        (GLOBEX, "budget", "total", 0),
    }
    zones = _rows(empty_database_url, "SELECT name, timezone FROM tenants ORDER BY name")
    assert zones == [("acme", "Europe/Berlin"), ("globex", "UTC"), ("quiet", "UTC")]

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1")
    command.downgrade(config, "0002")
    columns = "SELECT name, requests_per_minute, max_concurrent FROM tenants ORDER BY name"
    assert _rows(empty_database_url, columns) == [("acme", 60, 0), ("globex", None, 4), ("quiet", None, None)]
    budgets = "SELECT tenant_id, amount_nano_usd, period, timezone FROM budgets"
    assert set(_rows(empty_database_url, budgets)) == {
        (ACME, 2**53 - 1, "month", "Europe/Berlin"),
        (GLOBEX, 0, "total", "UTC"),
    }


def test_routes_have_one_target_and_rows_one_api_until_told_otherwise(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(empty_database_url, "0005")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("INSERT INTO pools (name) VALUES ('pool')")
        connection.execute(
            "INSERT INTO routes (name, pool, backend_model, context_length, default_output_tokens, max_output_tokens, "
            "timeout_s) VALUES ('m', 'pool', 'theirs', 1000, 50, 500, 30)"
        )
    upgrade(empty_database_url)

    async def routes() -> list[Route]:
        async with opened(empty_database_url) as engine:
            return await Catalog(engine, SystemClock()).routes()

    before = Route("m", "pool", "theirs", 1000, 50, 500, 30.0)
    assert asyncio.run(routes()) == [before]
    assert before.targets == (Target("pool", "theirs", weight=1.0, priority=0),)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("INSERT INTO route_targets VALUES ('m', 1, 'pool', 'other', 0.5, 1)")
        connection.execute(
            "INSERT INTO backends (name, pool, brand, base_url, context_length) VALUES ('b', 'pool', 'x', 'http:', 9)"
        )
    assert asyncio.run(routes())[0].targets[1:] == (Target("pool", "other", weight=0.5, priority=1),)

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1")
    command.downgrade(config, "0005")
    assert _rows(empty_database_url, "SELECT name, backend_model FROM routes") == [("m", "theirs")]
    upgrade(empty_database_url)
    assert asyncio.run(routes()) == [before]


def test_a_user_who_may_make_no_roles_is_told_what_to_ask_for_and_needs_no_more(
    postgres_server: str, empty_database_url: str
) -> None:
    user, database = f"plain_{uuid4().hex[:12]}", make_url(empty_database_url).database
    with psycopg.connect(postgres_server, autocommit=True) as server:
        server.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'p'")  # type: ignore[arg-type]
        try:
            server.execute(f'ALTER DATABASE "{database}" OWNER TO {user}')  # type: ignore[arg-type]
            url = make_url(empty_database_url).set(username=user, password="p").render_as_string(hide_password=False)
            told = CliRunner().invoke(cli, ["migrate", "--database-url", url])
            assert told.exit_code == 1
            # One line: no SQL, no stack.
            assert re.fullmatch(rf"Error: .*: ask for: .*GRANT penstock_tenant TO {user}\n", told.output)
            # As an administrator does, whichever other tests have made the role already.
            server.execute(f"GRANT penstock_tenant TO {user}")  # type: ignore[arg-type]
            upgrade(url)
            assert _rows(url, "SELECT pg_has_role('penstock_tenant', 'MEMBER')") == [(True,)]
        finally:
            server.execute(f'DROP DATABASE "{database}" WITH (FORCE)')  # type: ignore[arg-type]
            server.execute(f"DROP ROLE {user}")  # type: ignore[arg-type]


def test_a_user_who_may_make_roles_can_act_as_the_one_they_made(services_dir: Path) -> None:
    # Since Postgres 16 they are no member of it in the sense that counts, until they grant it to themselves.
    server = EmbeddedPostgres(services_dir, durable=False)
    url = make_url(server.start())
    try:
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as owner:
            owner.execute("CREATE ROLE maker LOGIN CREATEROLE PASSWORD 'p'")
            owner.execute("CREATE DATABASE theirs OWNER maker")
        theirs = url.set(username="maker", password="p", database="theirs").render_as_string(hide_password=False)
        upgrade(theirs)
        with psycopg.connect(theirs) as maker:
            maker.execute("SET ROLE penstock_tenant")
    finally:
        server.stop()


def test_another_database_may_be_making_the_role_just_now(services_dir: Path) -> None:
    server = EmbeddedPostgres(services_dir, durable=False)
    url = server.start()
    try:
        with psycopg.connect(url, autocommit=True) as watch:
            watch.execute("CREATE DATABASE other")
            other = make_url(url).set(database="other").render_as_string(hide_password=False)
            with psycopg.connect(url) as rival, ThreadPoolExecutor(1) as pool:
                rival.execute("CREATE ROLE penstock_tenant NOLOGIN")
                migration = pool.submit(upgrade, other)
                # It waits for the rival's commit, without which it cannot know whether the name is free.
                waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not watch.execute(waits).fetchone()[0]:  # type: ignore[index]
                    assert not migration.done()
                    time.sleep(0.02)
                rival.commit()
                migration.result()
        assert _rows(other, "SELECT has_table_privilege('penstock_tenant', 'limits', 'SELECT')") == [(True,)]
    finally:
        server.stop()
