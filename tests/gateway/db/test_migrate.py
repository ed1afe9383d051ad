from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from gateway.db import migrate
from gateway.db.engine import DatabaseUnavailable, psycopg_url, transaction
from gateway.db.migrate import MIGRATIONS, SchemaBehind, check_schema, upgrade
from gateway.db.partitions import months_ahead
from gateway.db.tables import metadata
from tests.gateway.db.support import opened
from tests.ports import free_port

SOURCE = MIGRATIONS.parent


def _tables(url: str) -> set[str]:
    engine = sqlalchemy.create_engine(psycopg_url(url), poolclass=sqlalchemy.NullPool)
    try:
        return set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()


async def test_only_a_schema_of_an_earlier_release_is_behind(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_earlier_revisions", lambda: frozenset({"0000"}))
    async with opened(empty_database_url) as engine:
        with pytest.raises(SchemaBehind):
            await check_schema(engine)
        async with transaction(engine) as connection:
            await connection.execute(sqlalchemy.text("CREATE TABLE alembic_version (version_num text)"))
        with pytest.raises(SchemaBehind):
            await check_schema(engine)
        for revision, behind in (("0000", True), ("9999", False)):
            async with transaction(engine) as connection:
                await connection.execute(sqlalchemy.text("DELETE FROM alembic_version"))
                insert = sqlalchemy.text("INSERT INTO alembic_version VALUES (:revision)")
                await connection.execute(insert, {"revision": revision})
            with pytest.raises(SchemaBehind) if behind else nullcontext():
                await check_schema(engine)


def test_the_head_is_not_earlier_than_itself() -> None:
    (head,) = ScriptDirectory(str(MIGRATIONS)).get_heads()
    assert head not in migrate._earlier_revisions()


def test_the_migrated_schema_is_the_declared_one(database_url: str) -> None:
    engine = sqlalchemy.create_engine(psycopg_url(database_url), poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "compare_type": True,
                "compare_server_default": True,
                "include_name": lambda name, kind, _: not (kind == "table" and name.startswith("usage_events_")),
            },
        )
        assert compare_metadata(context, metadata) == []
        stored = set(
            connection.scalars(sqlalchemy.text("SELECT conname FROM pg_constraint WHERE contype IN ('c', 'f', 'u')"))
        )
    declared = {
        str(constraint.name)
        for table in metadata.tables.values()
        for constraint in table.constraints
        if not isinstance(constraint, sqlalchemy.PrimaryKeyConstraint)
    }
    assert declared
    # Autogenerate does not look at check constraints.
    assert {name for name in declared if name.endswith("_check")} <= stored


def test_partitions_are_made_for_this_month_and_the_next_two(database_url: str) -> None:
    months = months_ahead(datetime.now(UTC), 2)
    assert {f"usage_events_{month:%Y_%m}" for month in months} <= _tables(database_url)


def test_several_may_migrate_at_once(empty_database_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for outcome in [pool.submit(upgrade, empty_database_url) for _ in range(4)]:
            outcome.result()
    assert "usage_events" in _tables(empty_database_url)


def test_a_migration_that_fails_leaves_nothing(empty_database_url: str) -> None:
    engine = sqlalchemy.create_engine(psycopg_url(empty_database_url), poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        # The migration comes to this name after it has made several tables.
        connection.execute(sqlalchemy.text("CREATE TABLE usage_rollup (x integer)"))
    with pytest.raises(sqlalchemy.exc.ProgrammingError):
        upgrade(empty_database_url)
    assert _tables(empty_database_url) == {"usage_rollup"}


def test_down_and_up_again(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1")
    command.downgrade(config, "base")
    assert _tables(database_url) == {"alembic_version"}
    command.upgrade(config, "head")
    assert "usage_events" in _tables(database_url)


def test_it_works_from_an_installed_package(empty_database_url: str, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site 100%", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for package in ("gateway", "migrations"):
        shutil.copytree(SOURCE / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    script = "import sys, gateway.db.migrate as m; print(m.MIGRATIONS); m.upgrade(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, empty_database_url],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(site / "migrations")
    assert "usage_events" in _tables(empty_database_url)


def test_a_server_that_is_away_is_told_so() -> None:
    with pytest.raises(DatabaseUnavailable, match="cannot migrate"):
        upgrade(f"postgresql://u:secret@127.0.0.1:{free_port()}/d")


def test_a_wrong_url_is_told_so() -> None:
    with pytest.raises(ValueError, match="postgresql://"):
        upgrade("sqlite:///x")
