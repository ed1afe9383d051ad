"""``penstock project``: create, list, rename and archive a tenant's projects."""

from __future__ import annotations

import click

from gateway.cli.policy_values import GivenPolicy, policy_option, policy_text
from gateway.cli.session import Session, run
from gateway.cli.values import all_pages, echo_table, show_time
from gateway.policies.answer_cache import CachePolicy
from gateway.tenants.records import ProjectRecord

_TENANT = click.option("--tenant", required=True, help="Whose project it is.")


@click.group()
def project() -> None:
    """Create, list, rename and archive the projects of tenants."""


@project.command()
@click.argument("name")
@_TENANT
def create(tenant: str, name: str) -> None:
    """Create a project, for which keys can be issued and limits set."""
    record = run(lambda session: session.directory.create_project(session.actor, tenant, name))
    click.echo(f"Project {record.name} created: penstock key create --tenant {tenant} --project {record.name}")


@project.command(name="list")
@_TENANT
@click.option("--archived", is_flag=True, help="Those too that are archived.")
def list_(tenant: str, archived: bool) -> None:
    """List a tenant's projects."""
    records = run(
        lambda session: all_pages(
            lambda after: session.directory.list_projects(tenant, after=after, limit=1000, archived=archived),
            lambda last: last.name,
        )
    )
    rows = [
        (record.name, str(record.id), show_time(record.created_at), show_time(record.archived_at)) for record in records
    ]
    echo_table(("PROJECT", "ID", "CREATED", "ARCHIVED"), rows)


@project.command()
@click.argument("name")
@click.argument("new_name")
@_TENANT
def rename(tenant: str, name: str, new_name: str) -> None:
    """Give a project another name. Its keys, limits and usage stay."""
    record = run(lambda session: session.directory.update_project(session.actor, tenant, name, name=new_name))
    click.echo(f"Project {name} is {record.name} from now on.")


@project.command(name="set")
@click.argument("name")
@_TENANT
@policy_option("answer_cache", CachePolicy, "--cache", "Of the answer cache")
def set_(tenant: str, name: str, answer_cache: GivenPolicy | None) -> None:
    """Say what a project wants of the answer cache, within what its tenant allows."""
    if answer_cache is None:
        raise click.UsageError("give at least one thing to change")

    async def work(session: Session) -> ProjectRecord:
        before = await session.directory.project(tenant, name)
        policy = answer_cache.applied(before.answer_cache)
        return await session.directory.update_project(
            session.actor, tenant, name, answer_cache=policy, if_version=before.version
        )

    click.echo(f"Project {name}, answer cache: {policy_text(run(work).answer_cache)}")


@project.command()
@click.argument("name")
@_TENANT
@click.confirmation_option(prompt="Its keys stop working at once and for good. Archive it?")
def archive(tenant: str, name: str) -> None:
    """End a project: its keys stop working. Its usage stays on record."""
    record = run(lambda session: session.directory.archive_project(session.actor, tenant, name))
    click.echo(f"Project {record.name} is archived since {show_time(record.archived_at)}.")
