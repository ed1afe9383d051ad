"""Bring the database's schema up to date. Run by an explicit command, never by a serving process."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config

from gateway.db.engine import CONNECT_TIMEOUT_S, DatabaseUnavailable, psycopg_url

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
"""Beside the ``gateway`` package, in a checkout and in an installed distribution alike."""
MIGRATION_LOCK = 7_233_921_000


def upgrade(database_url: str, revision: str = "head") -> None:
    """Migrate to ``revision`` in one transaction. Several processes may call it at once: one works, the others wait.

    Raises DatabaseUnavailable when Postgres cannot be reached, ValueError for a wrong URL.
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
    finally:
        engine.dispose()
