"""``penstock tenant``: create tenants, set their limits, list them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gateway.billing.usage import usd_text
from gateway.cli.session import run
from gateway.cli.values import UNLIMITED, LimitType, Unlimited, UsdType, echo_table, show_time
from gateway.tenants.principal import Budget, BudgetPeriod, Limits
from gateway.tenants.records import PERIODS, TenantRecord

F = TypeVar("F", bound=Callable[..., Any])


def _limit_options(command: F) -> F:
    options = (
        click.option("--requests-per-minute", type=LimitType(), help="0 refuses every request."),
        click.option("--max-concurrent", type=LimitType(), help="Requests that may run at once."),
        click.option("--budget", type=UsdType(), help="Most that may be charged in one period."),
        click.option("--period", type=click.Choice(PERIODS), help="Period of the budget. [default: month]"),
        click.option("--timezone", metavar="ZONE", help="IANA zone whose midnights begin periods. [default: UTC]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def tenant() -> None:
    """Create tenants, set their limits, list them."""


@tenant.command()
@click.argument("name")
@_limit_options
def create(name: str, **options: Any) -> None:
    """Create a tenant. Limits that are not given do not exist."""
    limits = _changed(Limits(), **options)
    record = run(lambda session: session.tenants.create_tenant(name, limits))
    click.echo(f"Tenant {record.name} created. Give it a key: penstock key create --tenant {record.name}")


@tenant.command(name="set")
@click.argument("name")
@_limit_options
def set_(name: str, **options: Any) -> None:
    """Change a tenant's limits; what is not given stays. `unlimited` lifts a limit."""
    if not any(value is not None for value in options.values()):
        raise click.UsageError("give at least one limit to change")
    record = run(lambda session: session.tenants.set_limits(name, lambda limits: _changed(limits, **options)))
    _show([record])


@tenant.command(name="list")
def list_() -> None:
    """List the tenants and their limits."""
    records = run(lambda session: session.tenants.list_tenants())
    if records:
        _show(records)
    else:
        click.echo("There are no tenants yet. Create one: penstock tenant create NAME")


def _changed(
    limits: Limits,
    *,
    requests_per_minute: int | Unlimited | None,
    max_concurrent: int | Unlimited | None,
    budget: int | Unlimited | None,
    period: BudgetPeriod | None,
    timezone: str | None,
) -> Limits:
    return Limits(
        requests_per_minute=_kept(limits.requests_per_minute, requests_per_minute),
        max_concurrent=_kept(limits.max_concurrent, max_concurrent),
        budget=_budget(limits.budget, budget, period, timezone),
    )


def _kept(before: int | None, given: int | Unlimited | None) -> int | None:
    if given is None:
        return before
    return None if given == UNLIMITED else given


def _budget(
    before: Budget | None, amount: int | Unlimited | None, period: BudgetPeriod | None, timezone: str | None
) -> Budget | None:
    kept = _kept(before.amount if before else None, amount)
    if kept is None:
        if period or timezone:
            raise click.UsageError("--period and --timezone belong to a budget; give --budget too")
        return None
    return Budget(
        kept,
        period or (before.period if before else "month"),
        timezone or (before.timezone if before else "UTC"),
    )


def _show(records: list[TenantRecord]) -> None:
    rows = []
    for record in records:
        limits = record.limits
        budget = limits.budget
        rows.append(
            (
                record.name,
                "-" if limits.requests_per_minute is None else limits.requests_per_minute,
                "-" if limits.max_concurrent is None else limits.max_concurrent,
                f"{usd_text(budget.amount)} per {budget.period}, {budget.timezone}" if budget else "-",
                show_time(record.created_at),
            )
        )
    headers = ("TENANT", "REQUESTS/MIN", "CONCURRENT", "BUDGET USD", "CREATED")
    echo_table(headers, rows, numbers=("REQUESTS/MIN", "CONCURRENT"))
