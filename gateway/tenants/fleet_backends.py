"""The part of a fleet file's plan that is about backends. What it shows holds no secret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from gateway.tenants.audit import Actor
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import PLAIN_FIELDS, BackendChange, BackendRecord, BackendSpec
from gateway.tenants.fleet_file import BackendEntry
from gateway.tenants.fleet_steps import Step, all_pages, at, differences, shown
from gateway.tenants.records import ConfigurationError
from gateway.tenants.specs import MAX_PAGE


async def plan_backends(
    changes: BackendChanges, actor: Actor, entries: Sequence[BackendEntry], environ: Mapping[str, str]
) -> tuple[list[Step], list[Step]]:
    """What has to be made and changed, and what is there that the entries leave out."""

    async def page(after: str | None) -> list[BackendRecord]:
        return await changes.list_backends(after=after, limit=MAX_PAGE)

    known = {record.name: record for record in await all_pages(page, lambda record: record.name)}
    steps = []
    for entry in entries:
        wanted = at(f"backend {entry.name!r}", lambda entry=entry: _wanted(entry, environ))  # type: ignore[misc]
        old = known.get(entry.name)
        step = _new(changes, actor, entry, wanted) if old is None else await _change(changes, actor, entry, wanted, old)
        if step is not None:
            steps.append(step)
    named = {entry.name for entry in entries}
    removals = [_removal(changes, actor, record) for name, record in known.items() if name not in named]
    return steps, removals


def _wanted(entry: BackendEntry, environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``BackendChange`` that the entry gives, secrets too. Raises ConfigurationError."""
    wanted = {field: getattr(entry, field) for field in PLAIN_FIELDS if getattr(entry, field) is not UNSET}
    if entry.api_key_env is not UNSET:
        wanted["api_key"] = _variable(entry.api_key_env, environ)
    if entry.headers is not UNSET or entry.headers_env is not UNSET:
        headers = dict(entry.headers or {})
        for name, variable in (entry.headers_env or {}).items():
            headers[name] = _variable(variable, environ)
        wanted["headers"] = headers
    return wanted


def _variable(name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(
            f"the environment variable {name[:100]!r} is not set; it holds a secret of the backend"
        )
    return value


def _new(changes: BackendChanges, actor: Actor, entry: BackendEntry, wanted: dict[str, Any]) -> Step:
    spec = at(f"backend {entry.name!r}", lambda: changes.checked(BackendSpec(name=entry.name, **wanted)))
    details = [f"{field} = {shown(getattr(spec, field))}" for field in PLAIN_FIELDS]
    if spec.api_key is not None:
        details.append(f"api_key = as {entry.api_key_env} has it")
    if spec.headers:
        details.append(f"headers = {shown(spec.headers)}")  # their names
    return Step("+", f"backend {spec.name}", lambda: changes.create_backend(actor, spec), tuple(details))


async def _change(
    changes: BackendChanges, actor: Actor, entry: BackendEntry, wanted: dict[str, Any], old: BackendRecord
) -> Step | None:
    merged = {field: getattr(old, field) for field in PLAIN_FIELDS} | wanted
    spec = at(f"backend {old.name!r}", lambda: changes.checked(BackendSpec(name=old.name, **merged)))
    changed: dict[str, Any] = {
        field: getattr(spec, field) for field in PLAIN_FIELDS if getattr(spec, field) != getattr(old, field)
    }
    details = list(differences(old, changed))
    moved = "base_url" in changed
    for field, told in (("api_key", f"as {entry.api_key_env} has it"), ("headers", shown(spec.headers))):
        if field not in wanted:
            continue
        given = {field: wanted[field]}
        same = await changes.has_secrets(old.name, BackendChange(**given))
        if not same:
            details.append(f"{field}: changed, {told}")
        if not same or moved:  # they may have to be sealed for another host
            changed |= given
    if not changed:
        return None
    return Step(
        "~",
        f"backend {old.name}",
        lambda: changes.update_backend(actor, old.name, BackendChange(**changed), if_version=old.version),
        tuple(details),
    )


def _removal(changes: BackendChanges, actor: Actor, record: BackendRecord) -> Step:
    return Step(
        "-",
        f"backend {record.name}",
        lambda: changes.delete_backend(actor, record.name, if_version=record.version),
    )
