"""``penstock pool`` and ``penstock route``: declare pools of backends, and the models that tenants can ask for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gateway.cli.policy_values import GivenPolicy, policy_option
from gateway.cli.session import Session, run
from gateway.cli.target_values import GivenTarget, TargetType, target_text
from gateway.cli.values import all_pages, echo_table, printable
from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.routing.registry import Registry, RegistryUnavailable
from gateway.routing.route import DEFAULT_OUTPUT_TOKENS, DEFAULT_TIMEOUT_S, Route, new_route
from gateway.settings import load_settings
from gateway.tenants.backend_specs import BackendRecord
from gateway.tenants.catalog import RouteChange, UnknownPool, UnknownRoute


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


@pool.command(name="show")
@click.argument("name")
def show_pool(name: str) -> None:
    """Show which routes use a pool, and who serves it."""

    async def work(session: Session) -> tuple[list[str], list[BackendRecord], list[str] | None]:
        if name not in await session.catalog.pools():
            raise UnknownPool(name)
        users = [
            route.name
            for route in await session.catalog.routes()
            if any(target.pool == name for target in route.targets)
        ]
        found = await all_pages(
            lambda after: session.backends.list_backends(pool=name, after=after, limit=1000), lambda last: last.name
        )
        return users, found, await _workers(name)

    users, backends, workers = run(work)
    click.echo(f"Routes: {', '.join(users) or 'none'}")
    shown = [each.name if each.enabled else f"{each.name} (disabled)" for each in backends]
    click.echo(f"Backends: {', '.join(shown) or 'none'}")
    click.echo(printable(f"Workers: {'Redis does not tell' if workers is None else ', '.join(workers) or 'none'}"))


async def _workers(pool: str) -> list[str] | None:
    """Ids of those that are alive; None if Redis is away."""
    settings = load_settings()
    try:
        async with Registry(settings.redis_url, ttl_s=settings.worker_ttl_s, timeout_s=2.0) as registry:
            await registry.refresh()
            return [
                worker.worker_id + (" (draining)" if worker.draining else "")
                for worker in registry.workers()
                if worker.pool == pool
            ]
    except RegistryUnavailable:
        return None


@pool.command(name="delete")
@click.argument("name")
def delete_pool(name: str) -> None:
    """Delete a pool that no route and no backend uses."""
    run(lambda session: session.catalog.delete_pool(session.actor, name))
    click.echo(f"Pool {name} is deleted.")


@click.group()
def route() -> None:
    """Declare routes: the models that tenants can ask for."""


@route.command(name="set")
@click.argument("name")
@click.option("--pool", help="Pool of backends that serve it, if it is one; the first of several.")
@click.option("--backend-model", help="Model to ask that pool's backends for. [default: the route's name]")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=TargetType(),
    metavar=TargetType.name,
    help="A pool that serves it, what to ask its backends for (as the route), its share beside targets of the same "
    "priority (1) and its priority (0, the first). May be given several times; those given are all that it has.",
)
@click.option(
    "--context-length",
    type=int,
    help="Tokens of prompt and output together that tenants are told of; what is too long, its backends refuse.",
)
@click.option("--default-output-tokens", type=int, help=f"When a request names no cap. [{DEFAULT_OUTPUT_TOKENS}]")
@click.option("--max-output-tokens", type=int, help="Largest cap. [the context length]")
@click.option("--timeout", "timeout_s", type=float, help=f"Seconds that one request may take. [{DEFAULT_TIMEOUT_S:g}]")
@click.option("--unpriced", type=click.Choice(["refuse", "serve"]), help="While it has no price. [refuse]")
@click.option(
    "--tokenizer",
    metavar="NAME|none",
    help="Encoding that counts prompts, as o200k_base, or `backend`; `none` bounds them by their bytes. [none]",
)
@policy_option("answer_cache", CachePolicy, "--cache", "Of the answer cache")
@click.option("--if-version", type=int, help="Only if the route still has this version.")
def set_route(
    name: str,
    if_version: int | None,
    targets: tuple[GivenTarget, ...],
    answer_cache: GivenPolicy | None,
    **options: Any,
) -> None:
    """Declare a route, or change one: what is not given stays. A new one needs --pool (or --target) and
    --context-length."""
    given = {option: value for option, value in options.items() if value is not None}
    if targets:
        if not given.keys().isdisjoint(("pool", "backend_model")):
            raise click.UsageError("give --target, or --pool and --backend-model, not both")
        first, *more = (target.named(name) for target in targets)
        given |= asdict(first) | {"more_targets": tuple(more)}
    if given.get("tokenizer") == "none":
        given["tokenizer"] = None

    async def work(session: Session) -> Route:
        version = if_version
        try:
            if answer_cache is not None:
                before = await session.catalog.stored_route(name)
                given["answer_cache"] = answer_cache.applied(before.answer_cache)
                version = before.version if version is None else version
            return await session.catalog.update_route(session.actor, name, RouteChange(**given), if_version=version)
        except UnknownRoute:
            if not {"pool", "context_length"} <= given.keys():
                raise click.UsageError(
                    f"there is no route {name!r} yet: give --pool (or --target) and --context-length"
                ) from None
        if answer_cache is not None:
            given["answer_cache"] = answer_cache.applied(NO_POLICY)
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
        "TARGETS",
        "CONTEXT",
        "OUTPUT",
        "MAX OUTPUT",
        "TIMEOUT S",
        "UNPRICED",
        "TOKENIZER",
        "CACHE",
        "VERSION",
    )
    rows = [
        (
            route.name,
            " ".join(target_text(target) for target in route.targets),
            route.context_length,
            route.default_output_tokens,
            route.max_output_tokens,
            f"{route.timeout_s:g}",
            route.unpriced,
            route.tokenizer or "-",
            route.answer_cache.mode or "-",
            route.version,
        )
        for route in routes
    ]
    echo_table(headers, rows, numbers=("CONTEXT", "OUTPUT", "MAX OUTPUT", "TIMEOUT S", "VERSION"))
