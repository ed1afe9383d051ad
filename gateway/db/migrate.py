"""Bring the database's schema up to date. Run by an explicit command, never by a serving process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import CONNECT_TIMEOUT_S, DatabaseUnavailable, psycopg_url, transaction

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
"""Beside the ``gateway`` package, in a checkout and in an installed distribution alike."""
MIGRATION_LOCK = 7_233_921_000
_REFUSALS = frozenset({"42501", "P0001"})
"""insufficient_privilege, and what migrations raise themselves."""


class SchemaBehind(Exception):
    """The database wants a migration."""


class MigrationRefused(Exception):
    """The database's user lacks a right that a migration needs; the message says which."""


async def check_schema(engine: AsyncEngine) -> None:
    """Raises SchemaBehind unless the schema is that of this release or, while a new one is rolled out, a later one.

    Raises DatabaseUnavailable too.
    """
    try:
        async with transaction(engine) as connection:
            revision = await connection.scalar(sqlalchemy.text("SELECT version_num FROM alembic_version"))
    except sqlalchemy.exc.ProgrammingError:
        revision = None
    if revision is None or revision in _earlier_revisions():
        raise SchemaBehind("run `penstock migrate`")


@cache
def _earlier_revisions() -> frozenset[str]:
    revisions = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    return frozenset(script.revision for script in revisions if not script.is_head)


def upgrade(database_url: str, revision: str = "head") -> None:
    """Migrate to ``revision`` in one transaction. Several processes may call it at once: one works, the others wait.

    Raises DatabaseUnavailable when Postgres cannot be reached, MigrationRefused, ValueError for a wrong URL.
    """
    config = Config()
    # Alembic reads "%" as the begin of an interpolation.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = sqlalchemy.create_engine(
        psycopg_url(database_url),
        poolclass=sqlalchemy.NullPool,
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "options": "-c timezone=UTC"},
    )
    try:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    except sqlalchemy.exc.OperationalError as fault:
        raise DatabaseUnavailable(f"cannot migrate: {fault.orig}") from fault
    except sqlalchemy.exc.DBAPIError as fault:
        if getattr(fault.orig, "sqlstate", None) not in _REFUSALS:
            raise
        message = fault.orig.diag.message_primary  # type: ignore[union-attr]
        raise MigrationRefused(f"the database's user may not migrate: {message}") from fault
    finally:
        engine.dispose()
