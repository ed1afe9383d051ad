"""Alembic's entry: ``gateway.db.migrate.upgrade`` hands it a connection, the ``alembic`` command reads the settings."""

from __future__ import annotations

import sqlalchemy
from alembic import context

from gateway.db.engine import psycopg_url
from gateway.db.tables import metadata
from gateway.settings import load_settings


def is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Whether autogenerate compares it: partitions come and go with the months."""
    return not (kind == "table" and name is not None and name.startswith("usage_events_"))


def migrate(connection: sqlalchemy.Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, include_name=is_ours)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("these migrations need a live database; --sql is not supported")

given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    engine = sqlalchemy.create_engine(psycopg_url(load_settings().database_url), poolclass=sqlalchemy.NullPool)
    with engine.begin() as own:
        migrate(own)
