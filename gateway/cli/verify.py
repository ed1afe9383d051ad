"""``penstock verify``: proof that counters, ledger and sums agree."""

from __future__ import annotations

import sys
from uuid import UUID

import click
import msgspec
from redis.exceptions import RedisError as ClientError

from gateway.admission.redis import RedisError, RedisUnavailable, create_redis
from gateway.admission.scripts import SNAPSHOT
from gateway.cli.session import Session, run
from gateway.cli.values import echo_table, printable
from gateway.settings import load_settings
from gateway.tenants.records import ConfigurationError
from gateway.verify.requests import REQUESTS
from gateway.verify.service import Verification, verify

TIMEOUT_S = 10.0
BUSY = 3


@click.command(name="verify")
@click.option("--tenant", metavar="NAME", help="Only what is this tenant's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify_(tenant: str | None, as_json: bool) -> None:
    """Prove that Redis' counters are what the ledger, events on their way to it and open requests come to, and that
    the ledger's sums are those of its rows.

    Runs beside the gateways, under load, and changes nothing. Exit status: 0 all agrees, 1 something differs, 3 a
    tenant was too busy to tell.
    """
    names: dict[UUID, str] = {}

    async def work(session: Session) -> Verification:
        tenant_id = None if tenant is None else (await session.directory.tenant(tenant)).id
        url = load_settings().redis_url
        redis = create_redis(url, timeout_s=TIMEOUT_S, scripts=(SNAPSHOT, REQUESTS), name="penstock-verify")
        try:
            result = await verify(redis, url, session.engine, tenant_id=tenant_id)
        finally:
            await redis.close()
        for wanted in {each.tenant_id for each in result.differences} | set(result.busy):
            if wanted is not None:
                names[wanted] = await _name(session, wanted)
        return result

    try:
        result = run(work)
    except (RedisUnavailable, RedisError, ClientError) as fault:
        raise click.ClickException(f"Redis does not answer: {fault}") from fault
    (_print_json if as_json else _print)(result, names)
    if result.differences:
        sys.exit(1)
    if result.busy:
        sys.exit(BUSY)


async def _name(session: Session, tenant_id: UUID) -> str:
    try:
        return (await session.directory.tenant(str(tenant_id))).name
    except ConfigurationError:
        return str(tenant_id)


def _print(result: Verification, names: dict[UUID, str]) -> None:
    if result.differences:
        rows = [
            (
                each.kind,
                names.get(each.tenant_id, "") if each.tenant_id else "",
                printable(" ".join(f"{name}={value}" for name, value in each.where)),
                each.expected,
                each.found,
                f"{each.difference:+d}",
                each.meaning,
            )
            for each in result.differences
        ]
        numbers = ("EXPECTED", "FOUND", "DIFFERENCE")
        echo_table(("KIND", "TENANT", "WHERE", *numbers, ""), rows, numbers=numbers)
    click.echo(
        f"{result.tenants} tenants, {result.counters} counters, {result.running} running requests, "
        f"{result.remembered} requests in Redis; {result.refusals_waiting} refusals on their way"
    )
    if result.unchecked:
        click.echo(f"{result.unchecked} counters could not be checked: windows that began before they were counted")
    if result.dead:
        click.echo(f"{result.dead} usage events are set aside; `penstock dead list` shows them")
    for tenant_id in result.busy:
        click.echo(f"{printable(names[tenant_id])} was too busy to tell; try again", err=True)
    if result.differences:
        click.echo(f"{len(result.differences)} differences", err=True)
    elif not result.busy:
        click.echo("All agrees.")


def _print_json(result: Verification, names: dict[UUID, str]) -> None:
    document = {
        "agrees": not result.differences and not result.busy,
        "differences": [
            {
                "kind": each.kind,
                "tenant": names.get(each.tenant_id) if each.tenant_id else None,
                "tenant_id": each.tenant_id,
                **dict(each.where),
                "expected": each.expected,
                "found": each.found,
                "difference": each.difference,
                "meaning": each.meaning or None,
            }
            for each in result.differences
        ],
        "busy": [names[each] for each in result.busy],
        "tenants": result.tenants,
        "counters": result.counters,
        "unchecked": result.unchecked,
        "running": result.running,
        "remembered": result.remembered,
        "refusals_waiting": result.refusals_waiting,
        "dead": result.dead,
    }
    click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
