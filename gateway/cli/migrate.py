"""``penstock migrate``."""

from __future__ import annotations

import click


@click.command()
@click.option(
    "--database-url",
    envvar="DATABASE_URL",
    show_envvar=True,
    metavar="URL",
    help="Postgres to migrate; the one of the settings, if not given.",
)
def migrate(database_url: str | None) -> None:
    """Bring the database's schema up to date.

    Safe to run at any time and by several at once: one works, the others wait. A gateway never does it by itself.
    """
    from gateway.db.engine import DatabaseUnavailable
    from gateway.db.migrate import MigrationRefused, upgrade
    from gateway.settings import load_settings

    url = database_url or load_settings().database_url
    try:
        upgrade(url)
    except (DatabaseUnavailable, MigrationRefused, ValueError) as fault:
        raise click.ClickException(str(fault)) from fault
    click.echo("The database is up to date.")
