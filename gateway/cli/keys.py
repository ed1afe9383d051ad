"""``penstock key`` and ``penstock admin-key``: issue, change, rotate, list and revoke keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import date, datetime
from typing import Any

import click

from gateway.cli.session import Session, run
from gateway.cli.values import (
    UNLIMITED,
    DurationType,
    ExpiryOrNeverType,
    ExpiryType,
    LimitType,
    all_pages,
    echo_table,
    resolve,
    show_time,
)
from gateway.tenants.principal import AdminRole
from gateway.tenants.records import KeyRecord
from gateway.tenants.specs import ROLES, SCOPES, KeyChange
from gateway.tenants.tenant_changes import DEFAULT_PROJECT

_EXPIRES = click.option("--expires", type=ExpiryType(), help="When it ends; never, if not given.")
_GRACE = click.option(
    "--grace",
    type=DurationType(),
    default="0s",
    show_default=True,
    help="How long the old secret is good, too: 90s, 2h, 7d.",
)
_CONTEXT = click.option("--max-context", type=LimitType(), help="Most tokens of prompt and output of one request.")
_OUTPUT = click.option("--max-output", type=LimitType(), help="Most tokens of output of one request.")


@click.group()
def key() -> None:
    """Issue, change, rotate, list and revoke tenants' API keys."""


@key.command(name="create")
@click.option("--tenant", required=True, help="Whose key it is.")
@click.option("--project", default=DEFAULT_PROJECT, show_default=True, help="What it belongs to.")
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
@_CONTEXT
@_OUTPUT
@_EXPIRES
def create_key(
    tenant: str,
    project: str,
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    max_context: int | str | None,
    max_output: int | str | None,
    expires: date | datetime | None,
) -> None:
    """Issue a key and print it. It is shown this once: only its hash is stored."""
    text, record = run(
        lambda session: session.directory.create_key(
            session.actor,
            tenant,
            name,
            project=project,
            scopes=scopes,
            allowed_models=_models(models) if models else None,
            max_context_tokens=_cap(max_context),
            max_output_tokens=_cap(max_output),
            expires_at=resolve(expires),
        )
    )
    _show_secret(text, record)


@key.command(name="list")
@click.option("--tenant", required=True, help="Whose keys to list.")
@click.option("--project", help="Only those of this project.")
def list_keys(tenant: str, project: str | None) -> None:
    """List a tenant's keys, without their secrets."""
    _show(_every(lambda session, after: session.directory.list_keys(tenant, project, after=after, limit=1000)))


@key.command(name="set")
@click.argument("key_id")
@click.option("--name", help="What it is for.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(sorted(SCOPES)), help="All that it may do.")
@click.option("--model", "models", multiple=True, help="All models it may use; `all` for every one.")
@_CONTEXT
@_OUTPUT
@click.option("--expires", type=ExpiryOrNeverType(), help="When it ends.")
def set_key(
    key_id: str,
    name: str | None,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    max_context: int | str | None,
    max_output: int | str | None,
    expires: date | datetime | str | None,
) -> None:
    """Change a key, by the id that `list` shows; what is not given stays. `unlimited` lifts a cap."""
    given: dict[str, Any] = {}
    if name is not None:
        given["name"] = name
    if scopes:
        given["scopes"] = frozenset(scopes)
    if models:
        given["allowed_models"] = _models(models)
    if max_context is not None:
        given["max_context_tokens"] = _cap(max_context)
    if max_output is not None:
        given["max_output_tokens"] = _cap(max_output)
    if expires is not None:
        given["expires_at"] = None if isinstance(expires, str) else resolve(expires)
    if not given:
        raise click.UsageError("give at least one thing to change")
    _show([run(lambda session: session.directory.update_key(session.actor, key_id, KeyChange(**given)))])


@key.command(name="rotate")
@click.argument("key_id")
@_GRACE
def rotate_key(key_id: str, grace: float) -> None:
    """Give a key another secret and print it. The old one ends now, or after --grace."""
    _rotate(key_id, grace)


@key.command(name="revoke")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """End a key, by the id that `list` shows. Gateways refuse it from then on."""
    _revoke(key_id)


@click.group()
def admin_key() -> None:
    """Issue, rotate, list and revoke administrators' keys, for the gateway's /admin."""


@admin_key.command(name="create")
@click.option("--name", default="admin", show_default=True, help="Whose it is.")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="owner",
    show_default=True,
    help="owner: everything; admin: everything but administrators' keys; viewer: only reads.",
)
@_EXPIRES
def create_admin_key(name: str, role: AdminRole, expires: date | datetime | None) -> None:
    """Issue an administrator's key and print it. It is shown this once."""
    text, record = run(
        lambda session: session.directory.create_admin_key(session.actor, name, role=role, expires_at=resolve(expires))
    )
    _show_secret(text, record)


@admin_key.command(name="list")
def list_admin_keys() -> None:
    """List the administrators' keys, without their secrets."""
    _show_admins(_every(lambda session, after: session.directory.list_admin_keys(after=after, limit=1000)))


@admin_key.command(name="rotate")
@click.argument("key_id")
@_GRACE
def rotate_admin_key(key_id: str, grace: float) -> None:
    """Give an administrator's key another secret and print it. The old one ends now, or after --grace."""
    _rotate(key_id, grace)


@admin_key.command(name="revoke")
@click.argument("key_id")
def revoke_admin_key(key_id: str) -> None:
    """End an administrator's key, by the id that `list` shows."""
    _revoke(key_id)


def _every(page: Callable[[Session, str | None], Awaitable[list[KeyRecord]]]) -> list[KeyRecord]:
    return run(lambda session: all_pages(lambda after: page(session, after), lambda last: last.public_id))


def _rotate(key_id: str, grace: float) -> None:
    text, record = run(lambda session: session.directory.rotate_key(session.actor, key_id, grace_s=grace))
    _show_secret(text, record)
    if record.previous_until is not None:
        click.echo(f"The secret before is good until {show_time(record.previous_until)}.", err=True)


def _revoke(key_id: str) -> None:
    record = run(lambda session: session.directory.revoke_key(session.actor, key_id))
    click.echo(f"Key {record.public_id} ({record.name}) is revoked since {show_time(record.revoked_at)}.")


def _models(given: tuple[str, ...]) -> frozenset[str] | None:
    return None if given == ("all",) else frozenset(given)


def _cap(given: int | str | None) -> int | None:
    return None if given is None or given == UNLIMITED else int(given)


def _show_secret(text: str, record: KeyRecord) -> None:
    # Alone on standard output, so that a script can take it.
    click.echo(text)
    click.echo(f"Keep it safe, it is not shown again. To end it: penstock key revoke {record.public_id}", err=True)


def _show(records: list[KeyRecord]) -> None:
    if not records:
        click.echo("There are no keys yet.")
        return
    headers = ("KEY ID", "NAME", "PROJECT", "SCOPES", "MODELS", "CONTEXT", "OUTPUT", "CREATED", "EXPIRES", "REVOKED")
    rows = [
        (
            record.public_id,
            record.name,
            record.project_name or "-",
            ",".join(sorted(record.scopes)),
            "all" if record.allowed_models is None else ",".join(sorted(record.allowed_models)),
            record.max_context_tokens or "-",
            record.max_output_tokens or "-",
            *_times(record),
        )
        for record in records
    ]
    echo_table(headers, rows, numbers=("CONTEXT", "OUTPUT"))


def _show_admins(records: list[KeyRecord]) -> None:
    if not records:
        click.echo("There are no administrators' keys yet.")
        return
    rows = [(record.public_id, record.name, record.role or "-", *_times(record)) for record in records]
    echo_table(("KEY ID", "NAME", "ROLE", "CREATED", "EXPIRES", "REVOKED"), rows)


def _times(record: KeyRecord) -> tuple[str, str, str]:
    return show_time(record.created_at), show_time(record.expires_at), show_time(record.revoked_at)
