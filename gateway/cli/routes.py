"""``penstock pool`` and ``penstock route``: declare pools of backends, and the models that tenants can ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from gateway.cli.session import Session, run
from gateway.cli.values import echo_table
from gateway.routing.route import Route

DEFAULT_OUTPUT_TOKENS = 512
DEFAULT_TIMEOUT_S = 300.0


@click.group()
def pool() -> None:
    """Declare pools of backends. Workers join a pool that is declared."""


@pool.command(name="set")
@click.argument("name")
def set_pool(name: str) -> None:
    """Declare a pool; one that is there stays as it is."""
    run(lambda session: session.catalog.create_pool(name))
    click.echo(f"Pool {name} is declared.")


@pool.command(name="list")
def list_pools() -> None:
    """List the pools."""
    for name in run(lambda session: session.catalog.pools()):
        click.echo(name)


@click.group()
def route() -> None:
    """Declare routes: the models that tenants can ask for."""


@route.command(name="set")
@click.argument("name")
@click.option("--pool", help="Pool of backends that serve it.")
@click.option("--backend-model", help="Model to ask the backends for. [default: the route's name]")
@click.option("--context-length", type=int, help="Most tokens of prompt and output together.")
@click.option("--default-output-tokens", type=int, help=f"When a request names no cap. [{DEFAULT_OUTPUT_TOKENS}]")
@click.option("--max-output-tokens", type=int, help="Largest cap. [the context length]")
@click.option("--timeout", "timeout_s", type=float, help=f"Seconds that one request may take. [{DEFAULT_TIMEOUT_S:g}]")
@click.option("--unpriced", type=click.Choice(["refuse", "serve"]), help="While it has no price. [refuse]")
def set_route(name: str, **options: Any) -> None:
    """Declare a route, or change one: what is not given stays. A new one needs --pool and --context-length."""
    given = {option: value for option, value in options.items() if value is not None}

    async def work(session: Session) -> Route:
        old = await session.catalog.route(name)
        if old is None and not {"pool", "context_length"} <= given.keys():
            raise click.UsageError(f"there is no route {name!r} yet: give --pool and --context-length")
        new = replace(old, **given) if old else _new_route(name, given)
        await session.catalog.create_route(new)
        return new

    _show([run(work)])


def _new_route(name: str, given: dict[str, Any]) -> Route:
    most = given.get("max_output_tokens", given["context_length"])
    defaults = {
        "backend_model": name,
        "default_output_tokens": min(DEFAULT_OUTPUT_TOKENS, most),
        "max_output_tokens": most,
        "timeout_s": DEFAULT_TIMEOUT_S,
    }
    return Route(name=name, **(defaults | given))


@route.command(name="list")
def list_routes() -> None:
    """List the routes."""
    _show(run(lambda session: session.catalog.routes()))


def _show(routes: list[Route]) -> None:
    headers = ("ROUTE", "POOL", "BACKEND MODEL", "CONTEXT", "OUTPUT", "MAX OUTPUT", "TIMEOUT S", "UNPRICED")
    rows = [
        (
            route.name,
            route.pool,
            route.backend_model,
            route.context_length,
            route.default_output_tokens,
            route.max_output_tokens,
            f"{route.timeout_s:g}",
            route.unpriced,
        )
        for route in routes
    ]
    echo_table(headers, rows, numbers=("CONTEXT", "OUTPUT", "MAX OUTPUT", "TIMEOUT S"))
