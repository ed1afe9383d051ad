"""``penstock price``: what a route's tokens cost, from when on."""

from __future__ import annotations

from datetime import date, datetime

import click

from gateway.billing.usage import Price
from gateway.cli.session import Session, run
from gateway.cli.values import MomentType, echo_table, resolve, show_time
from gateway.tenants.records import ConfigurationError


@click.group()
def price() -> None:
    """Set and list the prices of routes, in USD per million tokens."""


@price.command(name="set")
@click.argument("route")
@click.option("--input", "input_", required=True, metavar="USD", help="Per million prompt tokens.")
@click.option("--output", required=True, metavar="USD", help="Per million completion tokens.")
@click.option("--from", "begin", type=MomentType(), help="In force from then on. [now]")
def set_(route: str, input_: str, output: str, begin: date | datetime | None) -> None:
    """Give a route a price. Requests admitted before it are charged by the price that was in force then."""
    set_price = run(lambda session: session.catalog.set_price(route, input_, output, effective_from=resolve(begin)))
    _show([set_price])


@price.command(name="list")
@click.argument("route")
def list_(route: str) -> None:
    """List a route's prices, oldest first."""

    async def work(session: Session) -> list[Price]:
        if await session.catalog.route(route) is None:
            raise ConfigurationError(f"there is no route {route!r}; `penstock route list` shows them")
        return await session.catalog.prices(route)

    prices = run(work)
    if prices:
        _show(prices)
    else:
        click.echo(f"{route} has no price. Set one: penstock price set {route} --input USD --output USD")


def _show(prices: list[Price]) -> None:
    headers = ("ROUTE", "FROM", "INPUT USD/M", "OUTPUT USD/M")
    rows = [
        (
            price.route,
            show_time(price.effective_from),
            f"{price.input_usd_per_mtok:f}",
            f"{price.output_usd_per_mtok:f}",
        )
        for price in prices
    ]
    echo_table(headers, rows, numbers=("INPUT USD/M", "OUTPUT USD/M"))
