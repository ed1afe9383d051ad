"""``penstock backends``: declare servers that answer requests, beside workers that register themselves; try them."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from gateway.backends.brands import BRANDS
from gateway.backends.families import create_backends
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.transport import Transport
from gateway.backends.trial import Trials
from gateway.cli.session import Session, run
from gateway.cli.values import all_pages, echo_table, printable, show_time
from gateway.tenants.backend_specs import (
    PLAIN_FIELDS,
    BackendChange,
    BackendRecord,
    BackendSpec,
    UnknownBackend,
)

NONE = "none"
_PROMPT, _STDIN = "\0prompt", "-"
_ALIASES = {"add": "set", "remove": "delete"}
_NEEDED = ("pool", "brand", "base_url")
_MAY_BE_NONE = ("model", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s")
_AS_SET = "[as the gateway's settings have it]"
_IF_VERSION = click.option("--if-version", type=int, help="Only if the backend still has this version.")


class _Aliased(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


class _OrNone(click.ParamType[Any]):
    """A value of another type, or ``none``."""

    def __init__(self, inner: click.ParamType[Any], name: str) -> None:
        self._inner = inner
        self.name = f"{name}|{NONE}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NONE if value == NONE else self._inner.convert(value, param, ctx)


_SECONDS = _OrNone(click.FLOAT, "SECONDS")


@click.group(cls=_Aliased)
def backends() -> None:
    """Declare backends: servers that answer requests, beside the workers that register themselves.

    Every gateway uses a change within 5 s.
    """


@backends.command(name="set")
@click.argument("name")
@click.option("--pool", help="Pool that it belongs to.")
@click.option(
    "--brand",
    type=click.Choice([name for name, brand in BRANDS.items() if brand.family != "penstock"]),
    help="Whose server it is; `generic` is any that speaks OpenAI's API.",
)
@click.option(
    "--base-url", metavar="URL", help="http(s)://host, with the path that comes before the API's own, if any."
)
@click.option(
    "--api-key",
    is_flag=False,
    flag_value=_PROMPT,
    metavar="[-|none]",
    help="Ask for its API key at a prompt; with `-` read it from standard input; `none` takes it away.",
)
@click.option("--api-key-env", metavar="VARIABLE", help="Take its API key from this environment variable.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header to send with each request, if it is no secret; may be given several times, and those given are all "
    "that it has; `none` takes them away.",
)
@click.option(
    "--header-env", "headers_env", multiple=True, metavar="NAME=VARIABLE", help="The same, its value in a variable."
)
@click.option("--model", metavar="NAME|none", help="What to call the model there. [as the route's target has it]")
@click.option(
    "--context-length", type=int, help="Most tokens of prompt and output that it takes. [what is usual for its brand]"
)
@click.option(
    "--weight", type=float, help="Its share beside others of its pool and priority; 0: if no other is left. [1]"
)
@click.option("--priority", type=int, help="Lower first. [0]")
@click.option("--connect-timeout", "connect_timeout_s", type=_SECONDS, metavar="SECONDS|none", help=_AS_SET)
@click.option("--first-byte-timeout", "first_byte_timeout_s", type=_SECONDS, metavar="SECONDS|none", help=_AS_SET)
@click.option("--idle-timeout", "idle_timeout_s", type=_SECONDS, metavar="SECONDS|none", help=_AS_SET)
@_IF_VERSION
def set_(
    name: str,
    if_version: int | None,
    api_key: str | None,
    api_key_env: str | None,
    headers: tuple[str, ...],
    headers_env: tuple[str, ...],
    **options: Any,
) -> None:
    """Declare a backend, or change one: what is not given stays. `add` is the same.

    A new one needs --pool, --brand and --base-url. Its key and headers are sealed with PENSTOCK_SECRET_KEY and shown
    nowhere; with another host they have to be given anew.
    """
    given: dict[str, Any] = {
        option: None if value == NONE and option in _MAY_BE_NONE else value
        for option, value in options.items()
        if value is not None
    }
    given |= _api_key(api_key, api_key_env) | _headers(headers, headers_env)

    async def work(session: Session) -> tuple[BackendRecord, bool, list[str]]:
        record, new = await _set(session, name, given, if_version)
        sealed = given.get("api_key") or given.get("headers")
        return record, new, await session.backends.unreadable() if sealed else []

    record, new, unreadable = run(work)
    _show([record])
    if others := [each for each in unreadable if each != name]:
        click.echo(
            f"Beware: with this PENSTOCK_SECRET_KEY the secrets of {', '.join(others[:5])} cannot be read. If the "
            f"gateways have another one, they cannot use {name} either: set theirs, then the secrets again.",
            err=True,
        )
    if new:
        click.echo(f"Try it: penstock backends test {name}", err=True)


@backends.command(name="list")
@click.option("--pool", help="Only those of this pool.")
def list_(pool: str | None) -> None:
    """List the backends, without their secrets. Workers are not among them."""
    found = run(lambda session: _every(session, pool))
    if not found:
        click.echo("There are none.")
        return
    _show(found)


@backends.command()
@click.argument("name")
def show(name: str) -> None:
    """Show all of a backend but its secrets."""
    record = run(lambda session: session.backends.backend(name))
    rows: list[tuple[str, object]] = [("name", record.name)]
    rows += [(field, getattr(record, field)) for field in PLAIN_FIELDS]
    rows += [("api_key", "set" if record.has_api_key else None), ("headers", ", ".join(record.header_names) or None)]
    rows += [("version", record.version), ("created_at", show_time(record.created_at))]
    for field, value in rows:
        click.echo(f"{field}: {'-' if value is None else printable(str(value))}")


@backends.command(name="delete")
@click.argument("name")
@_IF_VERSION
def delete(name: str, if_version: int | None) -> None:
    """Delete a backend; requests that it is answering go on. `remove` is the same."""
    run(lambda session: session.backends.delete_backend(session.actor, name, if_version=if_version))
    click.echo(f"Backend {name} is deleted.")


@backends.command()
@click.argument("name")
def enable(name: str) -> None:
    """Let a backend have requests."""
    run(lambda session: session.backends.update_backend(session.actor, name, BackendChange(enabled=True)))
    click.echo(f"Backend {name} is enabled.")


@backends.command()
@click.argument("name")
def disable(name: str) -> None:
    """Give a backend no new requests."""
    run(lambda session: session.backends.update_backend(session.actor, name, BackendChange(enabled=False)))
    click.echo(f"Backend {name} is disabled.")


@backends.command()
@click.argument("name")
@click.option("--model", help="Model to ask for. [its own --model, else the first that it lists]")
@click.option("--embeddings", is_flag=True, help="Ask for an embedding, too.")
def test(name: str, model: str | None, embeddings: bool) -> None:
    """Try a backend from this machine, step by step, and say what to mend.

    It is asked for a few tokens, which its owner may charge.
    """

    async def work(session: Session) -> bool:
        endpoint = await session.backends.endpoint(name)
        passed = True
        async with Transport() as transport:
            trials = Trials(transport, create_backends(FleetWorker(None), session.clock))
            async for step in trials.steps(endpoint, model=model, embeddings=embeddings):
                passed = passed and step.passed
                mark = "ok  " if step.passed else "FAIL"
                click.echo(printable(f"{mark}  {step.name:<10}  {step.ms:>6} ms  {step.detail}"))
        return passed

    if not run(work):
        sys.exit(1)


async def _set(
    session: Session, name: str, given: dict[str, Any], if_version: int | None
) -> tuple[BackendRecord, bool]:
    """The backend, and whether it is new."""
    changes = session.backends
    try:
        return await changes.update_backend(session.actor, name, BackendChange(**given), if_version=if_version), False
    except UnknownBackend:
        if missing := [f"--{option.replace('_', '-')}" for option in _NEEDED if option not in given]:
            raise click.UsageError(f"there is no backend {name!r} yet: give {', '.join(missing)}") from None
    return await changes.create_backend(session.actor, BackendSpec(name=name, **given)), True


async def _every(session: Session, pool: str | None) -> list[BackendRecord]:
    return await all_pages(
        lambda after: session.backends.list_backends(pool=pool, after=after, limit=1000), lambda last: last.name
    )


def _api_key(option: str | None, variable: str | None) -> dict[str, str | None]:
    if option is not None and variable is not None:
        raise click.UsageError("give --api-key or --api-key-env, not both")
    if variable is not None:
        return {"api_key": _from_environment(variable)}
    if option is None:
        return {}
    if option == NONE:
        return {"api_key": None}
    if option == _PROMPT:
        return {"api_key": click.prompt("API key", hide_input=True, err=True).strip()}
    if option == _STDIN:
        return {"api_key": sys.stdin.readline().strip()}
    raise click.UsageError(
        "a key on the command line stays in the shell's history and is seen by every process: write --api-key alone "
        "for a prompt, --api-key - for standard input, or --api-key-env VARIABLE"
    )


def _headers(plain: tuple[str, ...], from_environment: tuple[str, ...]) -> dict[str, dict[str, str]]:
    if not plain and not from_environment:
        return {}
    found: dict[str, str] = {}
    for text in plain:
        if text == NONE:
            continue
        found |= [_pair("--header", text)]
    for text in from_environment:
        name, variable = _pair("--header-env", text)
        found[name] = _from_environment(variable)
    return {"headers": found}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise click.UsageError(f"{option} is written NAME={'VARIABLE' if option.endswith('env') else 'VALUE'}")
    return name.strip(), value.strip()


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise click.UsageError(f"the environment variable {variable[:100]} is not set")
    return value


def _show(records: list[BackendRecord]) -> None:
    headers = (
        "BACKEND",
        "POOL",
        "BRAND",
        "BASE URL",
        "KEY",
        "MODEL",
        "CONTEXT",
        "WEIGHT",
        "PRIORITY",
        "STATE",
        "VERSION",
    )
    rows = [
        (
            record.name,
            record.pool,
            record.brand,
            record.base_url,
            "yes" if record.has_api_key else "-",
            record.model or "-",
            record.context_length,
            f"{record.weight:g}",
            record.priority,
            "enabled" if record.enabled else "disabled",
            record.version,
        )
        for record in records
    ]
    echo_table(headers, rows, numbers=("CONTEXT", "WEIGHT", "PRIORITY", "VERSION"))
