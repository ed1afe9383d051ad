"""``penstock cache``: kept answers purged, and how often the semantic tier was right."""

from __future__ import annotations

import click

from gateway.administration.caches import MOST_DAYS
from gateway.cli.prompt_session import Rooms, run_in_rooms
from gateway.cli.values import echo_table
from gateway.tenants.plain_text import check_plain


@click.group()
def cache() -> None:
    """Purge kept answers; see how often the semantic cache was right."""


@cache.command()
@click.option("--tenant", required=True, help="Whose; name or id.")
@click.option("--model", help="Only of this route.")
@click.option("--version", help="Only of this version of the route and the models behind it.")
@click.option("--tag", help="Only of requests with this tag.")
@click.option("--yes", is_flag=True, help="Do not ask before all of the tenant's answers are forgotten.")
def purge(tenant: str, model: str | None, version: str | None, tag: str | None, yes: bool) -> None:
    """Forget a tenant's kept answers that have all that is named; all of them, if nothing is."""
    if not yes and model is None and version is None and tag is None:
        click.confirm(f"Forget all kept answers of {tenant}?", abort=True, err=True)

    async def work(rooms: Rooms) -> int:
        for name, value in (("model", model), ("version", version), ("tag", tag)):
            check_plain(name, value)
        return await rooms.caches.purge(rooms.actor, tenant, model=model, version=version, tag=tag)

    count = run_in_rooms(work)
    click.echo(f"{count} kept {'answer is' if count == 1 else 'answers are'} forgotten.")


@cache.command()
@click.option("--tenant", required=True, help="Whose; name or id.")
@click.option("--days", type=click.IntRange(1, MOST_DAYS), default=30, show_default=True, help="Of so many days.")
def agreement(tenant: str, days: int) -> None:
    """Tell how often the model agreed with what the semantic cache had for it.

    It is counted while the tenant's cache verifies some of its hits.
    """
    found = run_in_rooms(lambda rooms: rooms.caches.agreement(tenant, days=days))
    asked = found.agreed + found.disagreed
    rate = f"{100 * found.disagreed / asked:.2f}%" if asked else "-"
    headers = ("ASKED", "AGREED", "DISAGREED", "FALSE HITS")
    echo_table(headers, [(asked, found.agreed, found.disagreed, rate)], numbers=headers)
