"""``penstock usage``: what was asked, used and charged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from typing import Any, Literal, TypeVar, get_args

import click
import msgspec

from gateway.billing.export import cell, csv_of
from gateway.billing.forecast import Method, forecast
from gateway.billing.report_query import DIMENSIONS, MEASURES, STATUSES, Dimension, InvalidReport, NotFound, UsageQuery
from gateway.billing.report_rows import AdminUsageRow, fields_of, total
from gateway.billing.report_statement import Report
from gateway.billing.reports import dead_event_count, end_user_hasher, usage_report
from gateway.billing.usage import Status
from gateway.cli.dead import warn_of_dead
from gateway.cli.session import Session, run
from gateway.cli.values import MomentType, echo_table, resolve, zone_named
from gateway.settings import load_settings

_TOKENS = ("PROMPT TOKENS", "COMPLETION TOKENS")
_ALIASES = {"route": "model"}
F = TypeVar("F", bound=Callable[..., Any])
_METHODS: dict[Method, str] = {
    "weekdays": "each day costs what its weekday cost on average",
    "days": "each day costs what its weekday, or else any day, cost on average",
    "today": "the rate of today goes on",
}
Format = Literal["table", "json", "csv"]


class _Report(msgspec.Struct, frozen=True):
    tenant: str | None
    start: datetime | None
    end: datetime | None
    data: Sequence[AdminUsageRow]


def _filter(name: str, metavar: str, help: str) -> Callable[[F], F]:
    return click.option(f"--{name}", metavar=metavar, multiple=True, help=f"{help}; may be given several times.")


@click.command()
@click.option("--tenant", help="Only this tenant; all, if not given.")
@click.option("--start", type=MomentType(), help="Requests admitted from then on; a date means its midnight.")
@click.option("--end", type=MomentType(), help="Requests admitted before then.")
@click.option(
    "--group-by",
    "group_by",
    multiple=True,
    type=click.Choice([*DIMENSIONS, *_ALIASES]),
    help="What to sum apart; may be given several times. [tenant, unless one is named, and model]",
)
@_filter("project", "NAME", "Only this project")
@_filter("key", "ID", "Only by this key")
@_filter("model", "NAME", "Only for this model")
@_filter("backend", "ID", "Only served by this backend")
@_filter("end-user", "ID", "Only of this end user, by the client's id for it or the hash that is shown")
@_filter("tag", "TAG", "Only with this tag")
@click.option("--status", multiple=True, type=click.Choice(STATUSES), help="Only with this status.")
@_filter("month", "2026-11", "Only in this month")
@click.option(
    "--order-by", metavar="COLUMN", help=f"{', '.join(MEASURES)}, or what is grouped by; -charged: most first."
)
@click.option("--limit", type=click.IntRange(1, 10_000), help="Only so many lines.")
@click.option(
    "--timezone", default="UTC", show_default=True, metavar="ZONE", help="Zone of dates, hours, days, months."
)
@click.option("--format", "form", type=click.Choice(get_args(Format)), default="table", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As --format json.")
@click.option(
    "--forecast", "to_forecast", is_flag=True, help="What the tenant will have been charged by the month's end."
)
def usage(
    tenant: str | None,
    start: date | datetime | None,
    end: date | datetime | None,
    group_by: tuple[str, ...],
    timezone: str,
    form: Format,
    as_json: bool,
    to_forecast: bool,
    **filters: Any,
) -> None:
    """Show requests by status, tokens, and what was charged, to the last nano-USD.

    JSON and CSV have all kinds of tokens and what the requests cost as well.
    """
    if to_forecast:
        if start or end or group_by or form == "csv" or any(filters.values()):
            raise click.UsageError("--forecast is of one tenant's running month; only --tenant and --json go with it")
        _forecast(tenant, as_json or form == "json")
        return
    zone = zone_named(timezone)
    wanted: Any = [_ALIASES.get(name, name) for name in group_by] or (["model"] if tenant else ["tenant", "model"])
    query = UsageQuery(
        start=resolve(start, zone),
        end=resolve(end, zone),
        timezone=timezone,
        group_by=list(dict.fromkeys(wanted)),
        tenant=[tenant] if tenant else [],
        **filters,
    )

    async def work(session: Session) -> tuple[Report, int]:
        try:
            report = await usage_report(
                session.engine, query, hash_end_user=end_user_hasher(load_settings().secret_key)
            )
        except NotFound as fault:
            raise InvalidReport(
                fault.parameter, f"{fault}; `penstock {fault.parameter} list` shows those there are"
            ) from None
        return report, await dead_event_count(session.engine)

    report, dead = run(work)
    if as_json or form == "json":
        body = msgspec.json.encode(_Report(tenant, query.start, query.end, report.rows))
        click.echo(msgspec.json.format(body).decode())
    elif form == "csv":
        click.echo(csv_of(report.rows, query.group_by, costs=True), nl=False)
    elif report.rows:
        _show(report, query.group_by)
    else:
        click.echo(f"No usage of {f'tenant {tenant}' if tenant else 'any tenant'} in this time.")
    warn_of_dead(dead)


def _forecast(tenant: str | None, as_json: bool) -> None:
    if tenant is None:
        raise click.UsageError("--forecast is of one tenant; name it by --tenant")
    found = run(lambda session: forecast(session.engine, tenant, session.clock.now()))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    budget = found.budget
    lines = [
        ("Charged so far", found.charged_usd),
        (f"Forecast for {found.month}", found.forecast_usd),
        *([("Budget", budget.amount_usd), ("Left of it", budget.remaining_usd)] if budget else []),
        *([("Forecast beyond it", budget.excess_usd)] if budget and budget.excess_nano_usd else []),
    ]
    echo_table((f"TENANT {found.tenant}", "USD"), lines, numbers=("USD",))
    click.echo(f"Method: {_METHODS[found.method]}; {found.history_days} whole days of history, {found.timezone}.")
    if budget is not None and budget.exhausted_on is not None:
        click.echo(f"The budget is expected to be spent on {budget.exhausted_on}.")


def _show(report: Report, wanted: Sequence[Dimension]) -> None:
    """A status that no request had needs no column."""
    statuses = [status for status in STATUSES if any(row.requests_by_status[status] for row in report.rows)]
    fields = [field for dimension in wanted for field in fields_of(dimension) if field != "project_id"]
    table = [[_shown(getattr(row, name)) for name in fields] + _counts(row, statuses) for row in report.rows]
    # Requests with several tags are in several lines, and those that --limit left out are in none.
    if len(report.rows) > 1 and "tag" not in wanted and report.next_cursor is None:
        table.append(["total", *[""] * (len(fields) - 1), *_counts(total(report.rows), statuses)])
    saved = ("SAVED USD",) if "cache_hit" in statuses else ()
    counts = ("REQUESTS", *(status.upper() for status in statuses), *_TOKENS, "CHARGED USD", *saved)
    echo_table([*(name.upper().replace("_", " ") for name in fields), *counts], table, numbers=counts)
    if report.next_cursor is not None:
        click.echo("There are more lines than --limit shows.", err=True)


def _shown(value: object) -> str:
    return cell(value) if value is not None else "-"


def _counts(row: AdminUsageRow, statuses: Sequence[Status]) -> list[object]:
    by_status = [row.requests_by_status[status] for status in statuses]
    saved = [row.saved_usd] if "cache_hit" in statuses else []
    return [row.requests, *by_status, row.prompt_tokens, row.completion_tokens, row.charged_usd, *saved]
