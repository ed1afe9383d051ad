"""``penstock audit``: who changed what."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from gateway.cli.session import run
from gateway.cli.values import echo_table, show_time
from gateway.tenants.audit import AuditRecord

_SILENT = {"version", "archived_at", "revoked_at"}
"""Changed by what the action says already, or with every change."""


@click.command()
@click.option("--tenant", help="Only changes of this tenant.")
@click.option(
    "--kind",
    help="Only of these: tenant, project, key, admin_key, limit, pool, backend, route, price, prompt, answer_cache.",
)
@click.option("--actor", help="Only changes by this admin key, or by cli:USER.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1000), help="How many to show.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with all before and after.")
def audit(tenant: str | None, kind: str | None, actor: str | None, limit: int, as_json: bool) -> None:
    """Show what was changed, by whom, the newest first."""
    records = run(lambda session: session.directory.list_audit(tenant=tenant, kind=kind, actor=actor, limit=limit))
    if as_json:
        for record in records:
            click.echo(msgspec.json.encode(record).decode())
        return
    rows = [
        (show_time(record.at), record.actor, record.action, record.kind, record.target, changes_text(record))
        for record in records
    ]
    echo_table(("TIME", "BY", "ACTION", "WHAT", "WHICH", "CHANGED"), rows)


def changes_text(record: AuditRecord) -> str:
    """What an update changed, as ``amount: 10 -> 20``."""
    if record.before is None or record.after is None:
        return ""
    before, after = record.before, record.after
    names = [name for name in after if name not in _SILENT and before.get(name) != after[name]]
    return ", ".join(f"{name}: {_text(before.get(name))} -> {_text(after[name])}" for name in names)


def _text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
