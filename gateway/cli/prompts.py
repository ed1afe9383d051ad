"""``penstock prompts``: what was said, read, exported, asked again and erased."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

import click
import msgspec

from gateway.billing.usage import usd_text
from gateway.cli.prompt_session import Rooms, run_in_rooms
from gateway.cli.values import MomentType, echo_table, resolve, show_time
from gateway.promptlog.entry import Summary
from gateway.promptlog.exporting import line
from gateway.promptlog.filters import Filters
from gateway.promptlog.reader import MAX_LIMIT, Page
from gateway.settings import load_settings

F = TypeVar("F", bound=Callable[..., Any])
_OF = click.option("--tenant", required=True, help="Whose; name or id.")
_ID = click.argument("request_id", metavar="REQUEST_ID", type=click.UUID)
_LIMIT = click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(1, 100_000), help="How many to show."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def _filters(command: F) -> F:
    for option in reversed(
        (
            click.option("--start", type=MomentType(), help="Admitted from then on; a date is its midnight in UTC."),
            click.option("--end", type=MomentType(), help="Admitted before then."),
            click.option("--model", help="Only for this model, as the client named it."),
            click.option("--status", help="Only with this status."),
            click.option("--end-user", help="Only of this end user, by the client's id for it."),
            click.option("--end-user-hash", help="As --end-user, by the hash that is shown."),
            click.option("--tag", help="Only with this tag."),
        )
    ):
        command = option(command)
    return command


@click.group()
def prompts() -> None:
    """Read what was said and answered, ask it again, erase it.

    Whoever reads, exports or erases is written to the audit log.
    """


@prompts.command(name="list")
@_OF
@_filters
@_LIMIT
@_JSON
def list_(tenant: str, limit: int, as_json: bool, **given: Any) -> None:
    """List logged requests, the newest first, without what was said."""

    async def work(rooms: Rooms) -> list[Summary]:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        filters = _read(rooms, tenant_id, given)

        async def page(cursor: str | None, most: int) -> Page:
            return await rooms.prompts.page(tenant_id, filters, cursor=cursor, limit=most)

        return await _pages(page, limit)

    _show(run_in_rooms(work), as_json)


@prompts.command()
@click.argument("text")
@_OF
@_filters
@_LIMIT
@_JSON
def search(text: str, tenant: str, limit: int, as_json: bool, **given: Any) -> None:
    """List those in which TEXT was said or answered, in whatever case."""
    if not text:
        raise click.UsageError("the text to look for is empty")

    async def work(rooms: Rooms) -> list[Summary]:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        filters = _read(rooms, tenant_id, given)

        async def page(cursor: str | None, most: int) -> Page:
            return await rooms.prompts.scan(rooms.actor, tenant_id, text, filters, cursor=cursor, limit=most)

        return await _pages(page, limit)

    _show(run_in_rooms(work), as_json)


@prompts.command()
@_ID
@_OF
def show(request_id: UUID, tenant: str) -> None:
    """Show one, with what was said, as JSON."""

    async def work(rooms: Rooms) -> bytes:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        found = await rooms.prompts.entry(rooms.actor, tenant_id, request_id)
        if found is None:
            raise _not_there(tenant, request_id)
        return line(found.facts, found.feedback, found.request, found.response)

    click.echo(msgspec.json.format(run_in_rooms(work)).decode())


@prompts.command()
@_OF
@_filters
@click.option("--output", type=click.File("wb", lazy=True), help="File to write to. [standard output]")
def export(tenant: str, output: BinaryIO | None, **given: Any) -> None:
    """Write them as lines of JSON, oldest first, with what was said."""
    to = output or sys.stdout.buffer

    async def work(rooms: Rooms) -> int:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        count = 0
        async for each in rooms.prompts.export(rooms.actor, tenant_id, _read(rooms, tenant_id, given)):
            to.write(each)
            count += 1
        to.flush()
        return count

    count = run_in_rooms(work)
    if output is not None:
        click.echo(f"{count} written.", err=True)


@prompts.command()
@_OF
@click.option("--end-user", help="Only what this end user said, by the client's id for it.")
@click.option("--end-user-hash", help="As --end-user, by the hash that is shown.")
@click.option("--request", "request_id", metavar="REQUEST_ID", type=click.UUID, help="Only this request.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def erase(tenant: str, end_user: str | None, end_user_hash: str | None, request_id: UUID | None, yes: bool) -> None:
    """Erase what was said by a tenant, by one of its end users, or in one request, wherever it is kept.

    In the prompt log, among kept answers, answers of idempotency keys, and stored responses. It cannot be undone.
    """
    named = [each for each in (end_user, end_user_hash, request_id) if each is not None]
    if len(named) > 1:
        raise click.UsageError("name one of --end-user, --end-user-hash and --request")
    if not yes:
        what = f"of {named[0]} " if named else ""
        click.confirm(
            f"Erase all that is kept {what}of tenant {tenant}? Nothing can bring it back.", abort=True, err=True
        )

    async def work(rooms: Rooms) -> Any:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        whose = _read(rooms, tenant_id, {"end_user": end_user, "end_user_hash": end_user_hash}).end_user
        return await rooms.prompts.erase(rooms.actor, tenant_id, end_user=whose, request_id=request_id)

    receipt = run_in_rooms(work)
    click.echo(msgspec.json.format(msgspec.json.encode(receipt)).decode())
    if receipt.unfinished:
        click.echo("Error: not all was erased; run the command again when what failed is mended.", err=True)
        sys.exit(1)


@prompts.command()
@_ID
@_OF
@click.option("--model", help="Ask this one. [the same]")
@click.option("--key", envvar="PENSTOCK_API_KEY", help="API key to ask with. [that in PENSTOCK_API_KEY]")
@click.option("--url", help="Of the gateway. [that of the settings]")
@_JSON
def replay(request_id: UUID, tenant: str, model: str | None, key: str | None, url: str | None, as_json: bool) -> None:
    """Ask a logged request again, of the same or another model, and show both answers side by side."""
    from gateway.cli.replay import again, before, side_by_side

    if not key:
        raise click.UsageError("give the API key to ask with by --key, or in PENSTOCK_API_KEY")

    async def work(rooms: Rooms) -> Any:
        tenant_id = await rooms.prompts.tenant_id(tenant)
        return await rooms.prompts.asked(rooms.actor, tenant_id, request_id)

    found = run_in_rooms(work)
    if found is None:
        raise _not_there(tenant, request_id)
    asked, logged = found
    if asked.redacted:
        click.echo("Warning: the request was logged redacted, and is asked so.", err=True)
    then, now = before(logged), again(asked, url or _own_url(), key, model)
    click.echo(msgspec.json.encode({"then": then, "now": now}).decode() if as_json else side_by_side(then, now))


@prompts.command()
def rewrap() -> None:
    """Wrap all data keys by the master key that is set now; the one before need not be set any more then."""

    async def work(rooms: Rooms) -> tuple[int, int]:
        count = await rooms.data_keys.rewrap()
        left = await rooms.data_keys.by_master_key()
        return count, sum(left.values()) - left.get(rooms.data_keys.master_id, 0)

    count, left = run_in_rooms(work)
    click.echo(f"{count} data {'key is' if count == 1 else 'keys are'} wrapped anew.")
    if left:
        click.echo(
            f"Error: {left} are wrapped by a master key that is not set here; set it as PENSTOCK_PREVIOUS_MASTER_KEY.",
            err=True,
        )
        sys.exit(1)


async def _pages(page: Callable[[str | None, int], Any], limit: int) -> list[Summary]:
    found: list[Summary] = []
    cursor: str | None = None
    while len(found) < limit:
        came = await page(cursor, min(limit - len(found), MAX_LIMIT))
        found += came.entries
        cursor = came.cursor
        if cursor is None:
            break
    return found


def _read(rooms: Rooms, tenant_id: UUID, given: dict[str, Any]) -> Filters:
    def moment(name: str) -> datetime | None:
        value: date | datetime | None = given.get(name)
        return resolve(value)

    end_user, end_user_hash = given.get("end_user"), given.get("end_user_hash")
    if end_user is not None and end_user_hash is not None:
        raise click.UsageError("name the end user by --end-user or by --end-user-hash")
    whose = end_user_hash if end_user is None else rooms.prompts.hash_end_user(tenant_id, end_user)
    return Filters(
        since=moment("start"),
        until=moment("end"),
        model=given.get("model"),
        status=given.get("status"),
        end_user=whose,
        tag=given.get("tag"),
    )


def _show(found: list[Summary], as_json: bool) -> None:
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode({"entry": each.facts, "feedback": each.feedback}).decode())
        return
    if not found:
        click.echo("There are none. `penstock tenant show` tells whether the tenant's log is on.")
        return
    headers = ("TIME", "REQUEST", "MODEL", "STATUS", "TOKENS", "CHARGED USD", "MS", "CACHE", "SCORE")
    rows = [
        (
            show_time(each.facts.admitted_at),
            each.facts.request_id,
            each.facts.model,
            each.facts.status,
            f"{each.facts.prompt_tokens}+{each.facts.completion_tokens}",
            usd_text(each.facts.charged_nano_usd),
            "-" if each.facts.total_ms is None else each.facts.total_ms,
            each.facts.cache or "-",
            "-" if each.feedback is None else f"{each.feedback.score:g}",
        )
        for each in found
    ]
    echo_table(headers, rows, numbers=("TOKENS", "CHARGED USD", "MS", "SCORE"))


def _own_url() -> str:
    settings = load_settings()
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _not_there(tenant: str, request_id: UUID) -> click.ClickException:
    return click.ClickException(
        f"tenant {tenant!r} has no request {request_id} in its prompt log; `penstock prompts list --tenant {tenant}` "
        "shows those there are"
    )
