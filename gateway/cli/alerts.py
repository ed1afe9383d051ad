"""``penstock alert``: thresholds of budgets that were crossed, and whether the tenant's webhook took the news."""

from __future__ import annotations

from uuid import UUID

import click

from gateway.billing.alert_log import AlertRecord, UnknownAlert, list_alerts
from gateway.billing.alerts import resend_alert, send_test
from gateway.billing.usage import usd_text
from gateway.billing.webhook import NotDelivered
from gateway.cli.session import Session, run
from gateway.cli.values import echo_table, printable, show_time
from gateway.secret_key import SealBroken, SecretKey
from gateway.settings import load_settings
from gateway.tenants.records import as_id


@click.group()
def alert() -> None:
    """Look at crossed thresholds of budgets; send them again; try a webhook."""


@alert.command(name="list")
@click.option("--tenant", metavar="NAME", help="Only of this tenant.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="The newest so many.")
def list_(tenant: str | None, limit: int) -> None:
    """List them, newest first."""
    found = run(lambda session: list_alerts(session.engine, tenant=tenant, limit=limit))
    if not found:
        click.echo("There are none.")
        return
    rows = [
        (
            each.id,
            show_time(each.crossed_at),
            printable(" ".join(filter(None, (each.subject, each.target, each.window)))),
            f"{each.threshold} %",
            usd_text(each.spent_nano_usd),
            usd_text(each.amount_nano_usd),
            each.attempts,
            printable(_state(each)),
        )
        for each in found
    ]
    numbers = ("THRESHOLD", "SPENT", "AMOUNT", "ATTEMPTS")
    echo_table(("ID", "CROSSED", "BUDGET", *numbers, "STATE"), rows, numbers=numbers)


@alert.command()
@click.argument("alert_id", metavar="ID")
def resend(alert_id: str) -> None:
    """Send one again, whatever became of it."""

    async def work(session: Session) -> UUID:
        found = as_id(alert_id)
        if found is None:
            raise UnknownAlert(alert_id)
        return (await resend_alert(session.engine, session.actor, found, session.clock.now())).id

    click.echo(f"{run(work)} is sent again; `penstock alert list` shows what becomes of it.")


@alert.command()
@click.argument("tenant")
def test(tenant: str) -> None:
    """Send a tenant's webhook a message of type `test`, and tell what it answers."""
    secret = load_settings().secret_key
    if secret is None:
        raise click.ClickException("PENSTOCK_SECRET_KEY is not set; give it as the gateways have it")

    async def work(session: Session) -> int:
        tenant_id = (await session.directory.tenant(tenant)).id
        return await send_test(session.engine, SecretKey(secret), tenant_id, session.clock.now())

    try:
        click.echo(f"It was taken with status {run(work)}.")
    except (NotDelivered, SealBroken) as fault:
        raise click.ClickException(f"The webhook did not take it: {fault}") from fault


def _state(each: AlertRecord) -> str:
    if each.delivered_at is not None:
        return f"delivered {show_time(each.delivered_at)}"
    if each.given_up_at is not None:
        return f"given up {show_time(each.given_up_at)}: {each.last_error}"
    if each.next_attempt_at is None:
        return "not sent: no webhook"
    return f"next {show_time(each.next_attempt_at)}" + (f": {each.last_error}" if each.last_error else "")
