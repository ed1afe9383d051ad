"""``penstock usage``: what was asked, used and charged."""

from __future__ import annotations

from datetime import date, datetime

import click
import msgspec

from gateway.billing.reports import DIMENSIONS, STATUSES, Dimension, UsageRow, dead_event_count, usage_report
from gateway.billing.usage import usd_text
from gateway.cli.session import Session, run
from gateway.cli.values import MomentType, echo_table, resolve, zone_named

_COUNTS = ("REQUESTS", *(status.upper() for status in STATUSES), "PROMPT TOKENS", "COMPLETION TOKENS", "CHARGED USD")


class _Report(msgspec.Struct, frozen=True):
    tenant: str | None
    start: datetime | None
    end: datetime | None
    data: list[UsageRow]


@click.command()
@click.option("--tenant", help="Only this tenant; all, if not given.")
@click.option("--start", type=MomentType(), help="Requests admitted from then on; a date means its midnight.")
@click.option("--end", type=MomentType(), help="Requests admitted before then.")
@click.option(
    "--group-by",
    "group_by",
    multiple=True,
    type=click.Choice(DIMENSIONS),
    help="What to sum apart; may be given several times. [tenant, unless one is named, and route]",
)
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="Zone of dates and days.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with cached tokens and cost as well.")
def usage(
    tenant: str | None,
    start: date | datetime | None,
    end: date | datetime | None,
    group_by: tuple[Dimension, ...],
    timezone: str,
    as_json: bool,
) -> None:
    """Show requests by status, tokens, and what was charged, to the last nano-USD."""
    zone = zone_named(timezone)
    begin, finish = resolve(start, zone), resolve(end, zone)
    wanted: tuple[Dimension, ...] = group_by or (("route",) if tenant else ("tenant", "route"))

    async def work(session: Session) -> tuple[list[UsageRow], int]:
        tenant_id = None if tenant is None else (await session.tenants.tenant(tenant)).id
        rows = await usage_report(
            session.engine, tenant=tenant_id, start=begin, end=finish, group_by=wanted, timezone=timezone
        )
        return rows, await dead_event_count(session.engine)

    rows, dead = run(work)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_Report(tenant, begin, finish, rows))).decode())
    elif rows:
        _show(rows, wanted)
    else:
        click.echo(f"No usage of {f'tenant {tenant}' if tenant else 'any tenant'} in this time.")
    if dead:
        click.echo(
            f"Warning: {dead} usage events could not be recorded and are in no report; see the table "
            "dead_usage_events for each and its error.",
            err=True,
        )


def _show(rows: list[UsageRow], wanted: tuple[Dimension, ...]) -> None:
    names = [dimension for dimension in DIMENSIONS if dimension in wanted]
    table: list[list[object]] = [
        [getattr(row, "key_id" if name == "key" else name) for name in names] + _counts(row) for row in rows
    ]
    if len(rows) > 1:
        table.append(["total", *[""] * (len(names) - 1), *_counts(_total(rows))])
    echo_table([*map(str.upper, names), *_COUNTS], table, numbers=_COUNTS)


def _counts(row: UsageRow) -> list[object]:
    by_status = [row.requests_by_status[status] for status in STATUSES]
    return [row.requests, *by_status, row.prompt_tokens, row.completion_tokens, row.charged_usd]


def _total(rows: list[UsageRow]) -> UsageRow:
    charged = sum(row.charged_nano_usd for row in rows)
    cost = sum(row.cost_nano_usd for row in rows)
    return UsageRow(
        requests=sum(row.requests for row in rows),
        requests_by_status={status: sum(row.requests_by_status[status] for row in rows) for status in STATUSES},
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        charged_nano_usd=charged,
        charged_usd=usd_text(charged),
        cost_nano_usd=cost,
        cost_usd=usd_text(cost),
    )
