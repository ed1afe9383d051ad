"""``penstock dead``: usage events that could not become rows of the ledger, and what becomes of them."""

from __future__ import annotations

import sys

import click

from gateway.billing.dead import DeadEvent, DeadEvents, StillDead, UnknownDeadEvent
from gateway.cli.session import Session, run
from gateway.cli.values import echo_table, printable, show_time

_PAGE = 1000


@click.group()
def dead() -> None:
    """Look at usage events that could not be recorded; try them again, or give them up."""


@dead.command(name="list")
def list_() -> None:
    """List them, oldest first."""
    events = run(_all)
    if not events:
        click.echo("There are none.")
        return
    rows = [(event.id, show_time(event.recorded_at), event.shard, event.revision, event.error) for event in events]
    echo_table(("ID", "SET ASIDE", "SHARD", "REVISION", "ERROR"), rows, numbers=("ID", "REVISION"))


@dead.command()
@click.argument("dead_id", metavar="ID", type=int)
def show(dead_id: int) -> None:
    """Show one, with the event as it stood in the stream."""
    event = run(lambda session: _events(session).get(dead_id))
    click.echo(f"set aside  {show_time(event.recorded_at)}")
    click.echo(f"entry      {event.shard}:usage {printable(event.entry_id)}, revision {event.revision}")
    click.echo(f"error      {printable(event.error)}")
    click.echo(printable(event.raw.decode("utf-8", "backslashreplace")))


@dead.command()
@click.argument("dead_ids", metavar="[ID]...", type=int, nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every one that there is.")
def retry(dead_ids: tuple[int, ...], every: bool) -> None:
    """Write them to the ledger, once what was in their way is mended. What still fails stays."""
    if bool(dead_ids) == every:
        raise click.UsageError("name the dead events, or give --all")

    async def work(session: Session) -> int:
        """Tells of each at once, for what comes after may fail; returns how many did."""
        failed = 0
        for dead_id in dead_ids or [event.id for event in await _all(session)]:
            try:
                found = await _events(session).retry(session.actor, dead_id)
            except (StillDead, UnknownDeadEvent) as fault:
                failed += 1
                told = "stays" if isinstance(fault, StillDead) else "is gone"
                click.echo(f"{dead_id} {told}: {printable(str(fault))}", err=True)
            else:
                told = "is recorded" if found.new else "was recorded before; nothing changed"
                click.echo(f"{dead_id} {told}: request {found.request_id}")
        return failed

    if run(work):
        sys.exit(1)


@dead.command()
@click.argument("dead_id", metavar="ID", type=int)
def discard(dead_id: int) -> None:
    """Give one up: what it was charged is in no report then. The audit log keeps it."""
    run(lambda session: _events(session).discard(session.actor, dead_id))
    click.echo(f"{dead_id} is discarded; `penstock audit` still shows it.")


def warn_of_dead(count: int) -> None:
    """On standard error, beside a report that lacks them."""
    if count:
        click.echo(
            f"Warning: {count} usage events could not be recorded and are in no report; `penstock dead list` shows "
            "each and its error.",
            err=True,
        )


def _events(session: Session) -> DeadEvents:
    return DeadEvents(session.engine, session.clock)


async def _all(session: Session) -> list[DeadEvent]:
    events: list[DeadEvent] = []
    after = None
    while page := await _events(session).list(after=after, limit=_PAGE):
        events += page
        after = page[-1].id
    return events
