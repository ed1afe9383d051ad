"""``penstock apply``: make everything as a fleet file says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from gateway.cli.session import Session, run
from gateway.cli.values import printable
from gateway.secret_key import SecretKey
from gateway.settings import load_settings
from gateway.tenants.fleet_file import read_fleet_file
from gateway.tenants.fleet_plan import FleetPlanner
from gateway.tenants.fleet_steps import Step
from gateway.tenants.records import ConfigurationError


@click.command()
@click.option(
    "-f", "--file", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The fleet file, TOML."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
@click.option(
    "--prune",
    is_flag=True,
    help="Take away what the file's lists leave out: revoke keys, lift limits, delete routes and backends.",
)
@click.option(
    "--keys-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append new secrets to this file, which only its owner may read. [standard output]",
)
def apply(path: Path, dry_run: bool, yes: bool, prune: bool, keys_file: Path | None) -> None:
    """Make pools, backends, routes, prices and tenants as a file says.

    Shows the differences first and asks. What the file does not name stays as it is, unless --prune is given. Each step
    is in the audit log; done again, there is nothing to do.
    """
    try:
        fleet = read_fleet_file(path.read_text())
    except (OSError, UnicodeDecodeError) as fault:
        raise click.ClickException(f"{path} cannot be read: {fault}") from fault
    except ConfigurationError as fault:
        raise click.ClickException(f"{path}: {fault}") from fault
    settings = load_settings()

    async def work(session: Session) -> None:
        with _Secrets(None if dry_run else keys_file) as secrets:
            planner = FleetPlanner(
                directory=session.directory,
                catalog=session.catalog,
                backends=session.backends,
                prices=session.prices,
                clock=session.clock,
                actor=session.actor,
                secret_key=SecretKey(settings.secret_key) if settings.secret_key else None,
                tell_secret=secrets.tell,
                environ=os.environ,
                prune=prune,
            )
            steps = await planner.plan(fleet)
            if not steps:
                click.echo("Nothing to do: all is as the file says.")
                return
            _show(steps)
            if dry_run:
                return
            if not yes:
                click.confirm("Do it?", abort=True, err=True)
            for done, step in enumerate(steps):
                try:
                    await step.make()
                except ConfigurationError as fault:
                    raise click.ClickException(
                        f"{step.what}: {fault}. Of {len(steps)} steps {done} are done; run it again for the rest."
                    ) from fault
            click.echo(f"Done: {_counted(len(steps))}.", err=True)

    run(work)


class _Secrets:
    """Where secrets go as they are made, each on a line of its own: a name, a space, the secret."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> _Secrets:
        # Opened before anything is made: a secret that cannot be written down is lost.
        if self._path is not None:
            try:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            except OSError as fault:
                raise click.ClickException(f"{self._path} cannot be written: {fault.strerror}") from fault
            if stat.S_IMODE(os.fstat(self._descriptor).st_mode) & 0o077:
                os.close(self._descriptor)
                self._descriptor = None
                raise click.ClickException(f"others may read {self._path}; run `chmod 600 {self._path}` first")
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def tell(self, name: str, secret: str) -> None:
        if self._descriptor is None:
            click.echo(f"{name} {secret}")
        else:
            os.write(self._descriptor, f"{name} {secret}\n".encode())


def _show(steps: list[Step]) -> None:
    for step in steps:
        click.echo(printable(f"{step.sign} {step.what}"))
        for detail in step.details:
            click.echo(printable(f"    {detail}"))
    click.echo(f"{_counted(len(steps))} to make.", err=True)


def _counted(steps: int) -> str:
    return f"{steps} change" + ("s" if steps != 1 else "")
