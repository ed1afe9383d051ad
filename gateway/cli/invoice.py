"""``penstock invoice``: what a tenant owes for a month."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import click
import msgspec

from gateway.billing.invoice_page import invoice_page
from gateway.billing.invoices import Invoice
from gateway.billing.invoices import invoice as make_invoice
from gateway.billing.reports import dead_event_count
from gateway.cli.dead import warn_of_dead
from gateway.cli.session import Session, run
from gateway.cli.values import echo_table

Format = Literal["table", "json", "html"]


@click.command()
@click.argument("tenant")
@click.argument("month", metavar="YYYY-MM")
@click.option("--format", "form", type=click.Choice(get_args(Format)), default="table", show_default=True)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write JSON, or the page to print, to this file.",
)
def invoice(tenant: str, month: str, form: Format, output: Path | None) -> None:
    """Show what TENANT was charged for the month, of its own time zone, by project and model."""

    async def work(session: Session) -> tuple[Invoice, int]:
        made = await make_invoice(session.engine, tenant, month, session.clock.now())
        return made, await dead_event_count(session.engine)

    made, dead = run(work)
    warn_of_dead(dead)
    if form == "table":
        if output is not None:
            raise click.UsageError("--output goes with --format json or html")
        _show(made)
        return
    text = invoice_page(made) if form == "html" else msgspec.json.format(msgspec.json.encode(made)) + b"\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_bytes(text)
        click.echo(f"Wrote {output}.", err=True)


def _show(made: Invoice) -> None:
    click.echo(f"Invoice {made.number}, {made.start.isoformat()} to {made.end.isoformat()} ({made.timezone})")
    if not made.final:
        click.echo("Preliminary: the month, or a request of it, may still be running.", err=True)
    counts = ("REQUESTS", "PROMPT TOKENS", "COMPLETION TOKENS", "CHARGED USD")
    rows: list[list[object]] = [
        [line.project, line.model, line.requests, line.prompt_tokens, line.completion_tokens, line.charged_usd]
        for line in made.lines
    ]
    rows.append(
        [
            "total",
            "",
            made.requests,
            sum(line.prompt_tokens for line in made.lines),
            sum(line.completion_tokens for line in made.lines),
            made.charged_usd,
        ]
    )
    echo_table(["PROJECT", "MODEL", *counts], rows, numbers=counts)
    click.echo(f"Rounded to cents: {made.total_usd} USD")
