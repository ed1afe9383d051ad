"""``penstock up``."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address that the gateway listens on."
)
@click.option(
    "--port", default=8080, show_default=True, type=click.IntRange(1, 65535), help="Port that the gateway listens on."
)
@click.option(
    "--data-dir",
    default=".penstock",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where data, logs, settings and keys are kept.",
)
@click.option(
    "--database-url", envvar="DATABASE_URL", show_envvar=True, metavar="URL", help="Use this Postgres, start none."
)
@click.option("--redis-url", envvar="REDIS_URL", show_envvar=True, metavar="URL", help="Use this Redis, start none.")
def up(host: str, port: int, data_dir: Path, database_url: str | None, redis_url: str | None) -> None:
    """Run a whole Penstock on this machine: Postgres, Redis, one worker with a small real model, and the gateway.

    Runs in the foreground until Ctrl-C or SIGTERM, restarts what dies, and stops everything it started. The first time
    it makes a tenant with a key; data stays between runs.
    """
    from gateway.db.engine import psycopg_url
    from gateway.local.up import LocalPenstock, UpOptions
    from gateway.redis_url import parse_redis_url

    try:
        if database_url:
            psycopg_url(database_url)
        if redis_url:
            parse_redis_url(redis_url)
    except ValueError as fault:
        raise click.ClickException(str(fault)) from None
    sys.exit(LocalPenstock(UpOptions(data_dir, host, port, database_url, redis_url), click.echo).run())
