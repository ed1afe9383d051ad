"""``penstock key`` and ``penstock admin-key``: issue, list and revoke keys."""

from __future__ import annotations

from datetime import date, datetime

import click

from gateway.cli.session import run
from gateway.cli.values import ExpiryType, echo_table, resolve, show_time
from gateway.tenants.records import SCOPES, KeyRecord

_EXPIRES = click.option("--expires", type=ExpiryType(), help="When it ends; never, if not given.")


@click.group()
def key() -> None:
    """Issue, list and revoke tenants' API keys."""


@key.command(name="create")
@click.option("--tenant", required=True, help="Whose key it is.")
@click.option("--name", default="key", show_default=True, help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(SCOPES)),
    default=("inference",),
    show_default=True,
    help="What it may do; may be given several times.",
)
@click.option("--model", "models", multiple=True, help="Only model it may use; may be given several times. [all]")
@_EXPIRES
def create_key(
    tenant: str, name: str, scopes: tuple[str, ...], models: tuple[str, ...], expires: date | datetime | None
) -> None:
    """Issue a key and print it. It is shown this once: only its hash is stored."""
    text, record = run(
        lambda session: session.tenants.create_key(
            tenant, name, scopes=scopes, allowed_models=models or None, expires_at=resolve(expires)
        )
    )
    _show_secret(text, record)


@key.command(name="list")
@click.option("--tenant", required=True, help="Whose keys to list.")
def list_keys(tenant: str) -> None:
    """List a tenant's keys, without their secrets."""
    _show(run(lambda session: session.tenants.list_keys(tenant)))


@key.command(name="revoke")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """End a key, by the id that `list` shows. Gateways refuse it from then on."""
    _revoke(key_id)


@click.group()
def admin_key() -> None:
    """Issue, list and revoke administrators' keys, for the gateway's /admin."""


@admin_key.command(name="create")
@click.option("--name", default="admin", show_default=True, help="Whose it is.")
@_EXPIRES
def create_admin_key(name: str, expires: date | datetime | None) -> None:
    """Issue an administrator's key and print it. It is shown this once."""
    text, record = run(lambda session: session.tenants.create_admin_key(name, expires_at=resolve(expires)))
    _show_secret(text, record)


@admin_key.command(name="list")
def list_admin_keys() -> None:
    """List the administrators' keys, without their secrets."""
    _show(run(lambda session: session.tenants.list_keys()))


@admin_key.command(name="revoke")
@click.argument("key_id")
def revoke_admin_key(key_id: str) -> None:
    """End an administrator's key, by the id that `list` shows."""
    _revoke(key_id)


def _revoke(key_id: str) -> None:
    record = run(lambda session: session.tenants.revoke_key(key_id))
    click.echo(f"Key {record.public_id} ({record.name}) is revoked since {show_time(record.revoked_at)}.")


def _show_secret(text: str, record: KeyRecord) -> None:
    # Alone on standard output, so that a script can take it.
    click.echo(text)
    click.echo(f"Keep it safe, it is not shown again. To end it: penstock key revoke {record.public_id}", err=True)


def _show(records: list[KeyRecord]) -> None:
    if not records:
        click.echo("There are no keys yet.")
        return
    headers = ("KEY ID", "NAME", "SCOPES", "MODELS", "CREATED", "EXPIRES", "REVOKED")
    rows = [
        (
            record.public_id,
            record.name,
            ",".join(sorted(record.scopes)),
            "all" if record.allowed_models is None else ",".join(sorted(record.allowed_models)),
            show_time(record.created_at),
            show_time(record.expires_at),
            show_time(record.revoked_at),
        )
        for record in records
    ]
    echo_table(headers, rows)
