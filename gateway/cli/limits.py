"""``penstock limit``: limits of tenants, projects, keys, models and end users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gateway.billing.usage import usd_text
from gateway.cli.session import Session, run
from gateway.cli.values import UNLIMITED, CountType, UsdType, echo_table
from gateway.tenants.principal import Metric
from gateway.tenants.records import LimitRecord
from gateway.tenants.specs import PERIODS, RATE_WINDOWS, LimitSpec

F = TypeVar("F", bound=Callable[..., Any])
_TENANT = click.option("--tenant", required=True, help="Whose limit it is.")
_SUBJECTS = ("project", "key", "model", "end_user")
_AMOUNTS: dict[str, tuple[Metric, Any]] = {
    **{f"requests_per_{window}": ("requests", window) for window in RATE_WINDOWS},
    **{f"tokens_per_{window}": ("tokens", window) for window in RATE_WINDOWS},
    "concurrent": ("concurrent", None),
    **{f"budget_per_{period}" if period != "total" else "budget_total": ("budget", period) for period in PERIODS},
}


def _amounts(command: F) -> F:
    for name, (metric, _) in reversed(_AMOUNTS.items()):
        kind: click.ParamType[Any] = UsdType() if metric == "budget" else CountType()
        command = click.option(f"--{name.replace('_', '-')}", type=kind, metavar="USD" if metric == "budget" else "N")(
            command
        )
    return command


@click.group()
def limit() -> None:
    """Limit tenants, and within them projects, keys, models and end users."""


@limit.command(name="set")
@_TENANT
@click.option("--project", metavar="NAME", help="Of this project.")
@click.option("--key", metavar="KEY_ID", help="Of this key.")
@click.option("--model", metavar="ROUTE", help="Of what the tenant asks of this model.")
@click.option("--end-user", metavar="ID", help="Of this end user, as clients name it.")
@click.option("--each-end-user", is_flag=True, help="Of each end user apart.")
@_amounts
@click.option("--soft", is_flag=True, help="Refuse nothing, only tell.")
@click.option(
    "--threshold",
    "thresholds",
    type=click.IntRange(1, 1000),
    multiple=True,
    metavar="PERCENT",
    help="Tell the webhook when so much of the budget is spent; may be given several times.",
)
def set_(tenant: str, soft: bool, thresholds: tuple[int, ...], each_end_user: bool, **options: Any) -> None:
    """Set limits of one subject, in place of those of the same kind: the whole tenant, unless another is named.

    \b
    penstock limit set --tenant acme --project web --tokens-per-day 1000000
    penstock limit set --tenant acme --budget-per-month 50 --threshold 80 --threshold 100
    """
    named = {subject: options[subject] for subject in _SUBJECTS if options[subject] is not None}
    if each_end_user:
        named["end_user"] = "" if "end_user" not in named else None
    if len(named) > 1 or None in named.values():
        raise click.UsageError("a limit is of one subject: name one project, key, model or end user at most")
    ((subject, target),) = named.items() if named else (("tenant", ""),)
    if subject == "end_user" and not each_end_user and not target:
        raise click.UsageError("for each end user apart use --each-end-user")
    amounts = {name: options[name] for name in _AMOUNTS if options[name] is not None}
    if not amounts:
        raise click.UsageError("give at least one amount, such as --requests-per-minute 60")
    if thresholds and not any(_AMOUNTS[name][0] == "budget" for name in amounts):
        raise click.UsageError("--threshold belongs to a budget")
    if UNLIMITED in amounts.values():
        raise click.UsageError("to lift a limit use `penstock limit delete`")
    specs = [
        LimitSpec(
            subject=subject,  # type: ignore[arg-type]
            target=target,
            metric=metric,
            window=window,
            amount=amounts[name],
            hard=not soft,
            thresholds=thresholds if metric == "budget" else (),
        )
        for name, (metric, window) in _AMOUNTS.items()
        if name in amounts
    ]

    async def work(session: Session) -> tuple[list[LimitRecord], dict[str, str]]:
        records = await session.directory.set_limits(session.actor, tenant, specs)
        return records, await _project_names(session, tenant)

    _show(*run(work))


@limit.command(name="list")
@_TENANT
def list_(tenant: str) -> None:
    """List all limits of a tenant."""

    async def work(session: Session) -> tuple[list[LimitRecord], dict[str, str]]:
        return await session.directory.list_limits(tenant), await _project_names(session, tenant)

    records, names = run(work)
    if records:
        _show(records, names)
    else:
        click.echo(f"Tenant {tenant} has no limits.")


@limit.command()
@click.argument("limit_id")
@_TENANT
def delete(tenant: str, limit_id: str) -> None:
    """Lift a limit, by the id that `list` shows."""
    run(lambda session: session.directory.delete_limit(session.actor, tenant, limit_id))
    click.echo(f"Limit {limit_id} is lifted.")


async def _project_names(session: Session, tenant: str) -> dict[str, str]:
    projects = await session.directory.list_projects(tenant, limit=1000, archived=True)
    return {str(project.id): project.name for project in projects}


def _show(records: list[LimitRecord], project_names: dict[str, str]) -> None:
    rows = []
    for record in records:
        target = project_names.get(record.target, record.target) if record.subject == "project" else record.target
        each = "each" if record.subject == "end_user" else "-"
        rows.append(
            (
                str(record.id),
                record.subject.replace("_", " "),
                target or each,
                record.metric,
                record.window or "-",
                usd_text(record.amount) if record.metric == "budget" else record.amount,
                "hard" if record.hard else "soft",
                " ".join(f"{percent}%" for percent in record.thresholds) or "-",
            )
        )
    headers = ("LIMIT ID", "OF", "WHICH", "WHAT", "PER", "AMOUNT", "KIND", "THRESHOLDS")
    echo_table(headers, rows, numbers=("AMOUNT",))
