"""``penstock price``: what a route costs, tenants and you, from when on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import click
import msgspec

from gateway.billing.genai_import import HostedPrice
from gateway.billing.price_spec import Basis, PriceSpec, parse_rate
from gateway.billing.prices import Price
from gateway.cli.session import Session, run
from gateway.cli.values import MomentType, echo_table, resolve, show_time

F = TypeVar("F", bound=Callable[..., Any])
_SHORT = {
    "input_usd_per_mtok": "INPUT/M",
    "cached_input_usd_per_mtok": "CACHED/M",
    "cache_write_usd_per_mtok": "CACHE WRITE/M",
    "output_usd_per_mtok": "OUTPUT/M",
    "reasoning_usd_per_mtok": "REASONING/M",
    "usd_per_request": "REQUEST",
    "usd_per_image": "IMAGE",
    "compute_usd_per_hour": "COMPUTE/H",
}
"""Columns of the list; those that no price of it has are left out."""


@click.group()
def price() -> None:
    """Set and list the prices of routes, in USD."""


def _whose(command: F) -> F:
    options = (
        click.option("--tenant", help="Only this tenant's own price, which takes the place of the list price."),
        click.option(
            "--basis",
            type=click.Choice(["charge", "cost"]),
            default="charge",
            help="What tenants pay, or what the backends cost you. [charge]",
        ),
        click.option("--from", "begin", type=MomentType(), help="In force from then on. [now]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@price.command(name="set")
@click.argument("route")
@click.option("--input", "input_usd_per_mtok", required=True, metavar="USD", help="Per million prompt tokens.")
@click.option("--output", "output_usd_per_mtok", required=True, metavar="USD", help="Per million completion tokens.")
@click.option(
    "--cached-input", "cached_input_usd_per_mtok", metavar="USD", help="Per million read from a cache. [input]"
)
@click.option("--cache-write", "cache_write_usd_per_mtok", metavar="USD", help="Per million written to one. [input]")
@click.option("--reasoning", "reasoning_usd_per_mtok", metavar="USD", help="Per million reasoning tokens. [output]")
@click.option("--request", "usd_per_request", metavar="USD", help="Per request. [0]")
@click.option("--image", "usd_per_image", metavar="USD", help="Per image. [0]")
@click.option("--compute", "compute_usd_per_hour", metavar="USD", help="Per hour of one device. [0]")
@click.option("--compute-ceiling", "compute_ceiling_s", type=float, help="Device seconds that a request reserves.")
@_whose
def set_(
    route: str,
    tenant: str | None,
    basis: Basis,
    begin: date | datetime | None,
    compute_ceiling_s: float | None,
    **rates: str | None,
) -> None:
    """Give a route a price. Requests admitted before it are charged by the price that was in force then."""

    async def work(session: Session) -> Price:
        spec = PriceSpec(
            route=route,
            tenant=tenant,
            basis=basis,
            compute_ceiling_s=compute_ceiling_s,
            effective_from=resolve(begin),
            **{name: parse_rate(name, text) for name, text in rates.items() if text is not None},  # type: ignore[arg-type]
        )
        return await session.prices.set_price(session.actor, spec)

    _show([run(work)])


@price.command(name="import")
@click.argument("route")
@click.option("--provider", required=True, help="As genai-prices names it, such as openai or anthropic.")
@click.option("--model", required=True, help="As the provider names it, such as gpt-4o.")
@_whose
@click.option("--dry-run", is_flag=True, help="Only show what would be set.")
def import_(
    route: str,
    provider: str,
    model: str,
    tenant: str | None,
    basis: Basis,
    begin: date | datetime | None,
    dry_run: bool,
) -> None:
    """Give a route the price of a hosted model, from the data of the genai-prices package."""

    async def work(session: Session) -> tuple[HostedPrice, Price | None]:
        found = await session.prices.hosted_price(
            route, provider, model, tenant=tenant, basis=basis, effective_from=resolve(begin)
        )
        return found, None if dry_run else await session.prices.set_price(session.actor, found.spec)

    found, price = run(work)
    for note in found.notes:
        click.echo(note, err=True)
    if price is not None:
        _show([price])
    else:
        for name, value in msgspec.structs.asdict(found.spec).items():
            if value is not None:
                click.echo(f"{name} = {value:f}" if isinstance(value, Decimal) else f"{name} = {value}")


@price.command(name="list")
@click.argument("route")
@click.option("--tenant", help="Only this tenant's own prices.")
@click.option("--basis", type=click.Choice(["charge", "cost"]), help="Only these.")
def list_(route: str, tenant: str | None, basis: Basis | None) -> None:
    """List a route's prices, those to come too: list prices first, then tenants' own, each oldest first."""

    async def work(session: Session) -> list[Price]:
        return await session.prices.prices(route, tenant=tenant, basis=basis)

    prices = run(work)
    if prices:
        _show(prices)
    else:
        click.echo(f"{route} has no price. Set one: penstock price set {route} --input USD --output USD")


@price.command()
@click.argument("price_id", type=click.UUID)
@click.option("--at", type=MomentType(), help="When it ends. [now]")
def end(price_id: UUID, at: date | datetime | None) -> None:
    """Let a price end. The list price takes the place of a tenant's own; without one the route is unpriced."""
    _show([run(lambda session: session.prices.end_price(session.actor, price_id, resolve(at)))])


def _show(prices: list[Price]) -> None:
    rates = {name: head for name, head in _SHORT.items() if any(getattr(price, name) is not None for price in prices)}
    headers = ("ROUTE", "FROM", "UNTIL", "FOR", *rates.values(), "SOURCE", "ID")
    rows = [
        (
            price.route,
            show_time(price.effective_from),
            show_time(price.effective_until),
            price.basis if price.tenant_id is None else str(price.tenant_id),
            *(_rate(price, name) for name in rates),
            price.source or "-",
            price.id,
        )
        for price in prices
    ]
    echo_table(headers, rows, numbers=tuple(rates.values()))


def _rate(price: Price, name: str) -> str:
    rate = getattr(price, name)
    return "-" if rate is None else f"{rate:f}"
