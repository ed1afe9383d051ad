"""``penstock``: run a gateway and manage its tenants, keys, prices and routes.

Commands live in modules of their own, imported when they are called for, so that ``penstock --help`` and small commands
are quick.
"""

from __future__ import annotations

import importlib
import sys

import click

from gateway.settings import SettingsError

_COMMANDS = {
    "up": "gateway.cli.up:up",
    "serve": "gateway.cli.serve:serve",
    "migrate": "gateway.cli.migrate:migrate",
    "tenant": "gateway.cli.tenants:tenant",
    "project": "gateway.cli.projects:project",
    "key": "gateway.cli.keys:key",
    "limit": "gateway.cli.limits:limit",
    "admin-key": "gateway.cli.keys:admin_key",
    "pool": "gateway.cli.routes:pool",
    "backends": "gateway.cli.backends:backends",
    "route": "gateway.cli.routes:route",
    "price": "gateway.cli.prices:price",
    "apply": "gateway.cli.apply:apply",
    "usage": "gateway.cli.usage:usage",
    "invoice": "gateway.cli.invoice:invoice",
    "prompts": "gateway.cli.prompts:prompts",
    "cache": "gateway.cli.cache:cache",
    "dead": "gateway.cli.dead:dead",
    "alert": "gateway.cli.alerts:alert",
    "verify": "gateway.cli.verify:verify_",
    "audit": "gateway.cli.audit:audit",
}
_ALIASES = {"backend": "backends"}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = _ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def cli() -> None:
    """An LLM gateway with its own fleet of workers.

    Settings come from the environment (DATABASE_URL, REDIS_URL, PENSTOCK_...), else from .penstock/settings.toml, which
    `penstock up` writes: in a checkout where it has run, every command works without further settings.
    """


def main() -> None:
    """The entry point: faults that the user can mend end in one line, not in a stack."""
    try:
        cli.main(prog_name="penstock")
    except SettingsError as fault:
        click.echo(f"Error: {fault}", err=True)
        sys.exit(2)
