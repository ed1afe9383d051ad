"""``penstock pool`` and ``penstock route``: declare pools of backends, and the models that tenants can ask for."""

from __future__ import annotations

from typing import Any

import click

from gateway.cli.session import Session, run
from gateway.cli.values import echo_table
from gateway.routing.route import DEFAULT_OUTPUT_TOKENS, DEFAULT_TIMEOUT_S, Route, new_route
from gateway.tenants.catalog import RouteChange, UnknownRoute


@click.group()
def pool() -> None:
    """Declare pools of backends. Workers join a pool that is declared."""


@pool.command(name="set")
@click.argument("name")
def set_pool(name: str) -> None:
    """Declare a pool; one that is there stays as it is."""
    run(lambda session: session.catalog.create_pool(session.actor, name))
    click.echo(f"Pool {name} is declared.")


@pool.command(name="list")
def list_pools() -> None:
    """List the pools."""
    for name in run(lambda session: session.catalog.pools()):
        click.echo(name)


@pool.command(name="delete")
@click.argument("name")
def delete_pool(name: str) -> None:
    """Delete a pool that no route uses."""
    run(lambda session: session.catalog.delete_pool(session.actor, name))
    click.echo(f"Pool {name} is deleted.")


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
@click.option(
    "--tokenizer",
    metavar="NAME|none",
    help="Encoding that counts prompts, as o200k_base, or `backend`; `none` bounds them by their bytes. [none]",
)
@click.option("--if-version", type=int, help="Only if the route still has this version.")
def set_route(name: str, if_version: int | None, **options: Any) -> None:
    """Declare a route, or change one: what is not given stays. A new one needs --pool and --context-length."""
    given = {option: value for option, value in options.items() if value is not None}
    if given.get("tokenizer") == "none":
        given["tokenizer"] = None

    async def work(session: Session) -> Route:
        try:
            return await session.catalog.update_route(session.actor, name, RouteChange(**given), if_version=if_version)
        except UnknownRoute:
            if not {"pool", "context_length"} <= given.keys():
                raise click.UsageError(f"there is no route {name!r} yet: give --pool and --context-length") from None
        return await session.catalog.create_route(session.actor, new_route(name, **given))

    _show([run(work)])


@route.command(name="delete")
@click.argument("name")
@click.option("--if-version", type=int, help="Only if the route still has this version.")
def delete_route(name: str, if_version: int | None) -> None:
    """Delete a route: nobody can ask for it any more. Its prices and what was charged stay on record."""
    run(lambda session: session.catalog.delete_route(session.actor, name, if_version=if_version))
    click.echo(f"Route {name} is deleted.")


@route.command(name="list")
def list_routes() -> None:
    """List the routes."""
    _show(run(lambda session: session.catalog.routes()))


def _show(routes: list[Route]) -> None:
    headers = (
        "ROUTE",
        "POOL",
        "BACKEND MODEL",
        "CONTEXT",
        "OUTPUT",
        "MAX OUTPUT",
        "TIMEOUT S",
        "UNPRICED",
        "TOKENIZER",
        "VERSION",
    )
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
            route.tokenizer or "-",
            route.version,
        )
        for route in routes
    ]
    echo_table(headers, rows, numbers=("CONTEXT", "OUTPUT", "MAX OUTPUT", "TIMEOUT S", "VERSION"))
