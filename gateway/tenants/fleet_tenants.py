"""The part of a fleet file's plan that is about one tenant: its settings, projects, keys and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.billing.usage import usd_text
from gateway.clock import Clock
from gateway.secret_key import SecretKey
from gateway.tenants.audit import Actor
from gateway.tenants.directory import Directory
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.fleet_file import KeyEntry, LimitEntry, TenantEntry
from gateway.tenants.fleet_steps import Step, TellSecret, all_pages, at, differences, shown
from gateway.tenants.records import (
    ConfigurationError,
    KeyRecord,
    LimitRecord,
    ProjectRecord,
    StateConflict,
    TenantRecord,
    check_name,
)
from gateway.tenants.specs import (
    MAX_PAGE,
    KeyChange,
    LimitSpec,
    TenantChange,
    TenantSettings,
    check_cap,
    check_expiry,
    check_names,
    check_scopes,
    check_settings,
)
from gateway.tenants.tenant_changes import DEFAULT_PROJECT

_SETTINGS = TenantSettings.__struct_fields__
_Identity = tuple[str, str, str, str | None]
"""Subject, target, metric and window of a limit."""


@dataclass(slots=True)
class _Known:
    """A tenant as it is; nothing of a new one."""

    tenant: TenantRecord | None
    projects: dict[str, ProjectRecord] = field(default_factory=dict)
    keys: dict[str, KeyRecord] = field(default_factory=dict)
    """Those that are not revoked, by name; of several the youngest."""
    all_keys: list[KeyRecord] = field(default_factory=list)
    limits: dict[_Identity, LimitRecord] = field(default_factory=dict)


class TenantPlanner:
    def __init__(
        self, directory: Directory, clock: Clock, actor: Actor, secret_key: SecretKey | None, tell_secret: TellSecret
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._actor = actor
        self._secret_key = secret_key
        self._tell_secret = tell_secret
        self._issued: dict[tuple[str, str], str] = {}
        """Public ids of keys that steps have made, by tenant and name."""

    async def plan(self, entry: TenantEntry, tenant: TenantRecord | None) -> tuple[list[Step], list[Step]]:
        """What has to be made and changed, and what is there that the entry's lists leave out."""
        if tenant is not None and tenant.archived_at is not None:
            raise StateConflict(f"tenant {entry.name!r} is archived, and stays so; give the other one another name")
        known = await self._read(tenant)
        steps = self._tenant(entry, tenant)
        removals: list[Step] = []
        for kind, plan in (
            ("projects", self._projects),
            # Before the keys, so that none is without them, not even if the rest fails.
            ("limits", self._limits),
            ("keys", self._keys),
            ("limits", self._limits_of_keys),
        ):
            if getattr(entry, kind) is not UNSET:
                made, removed = plan(entry, known)
                steps += made
                removals = removed + removals
        return steps, removals

    async def _read(self, tenant: TenantRecord | None) -> _Known:
        if tenant is None:
            return _Known(None)
        directory = self._directory

        async def projects(after: str | None) -> list[ProjectRecord]:
            return await directory.list_projects(tenant.id, after=after, limit=MAX_PAGE, archived=True)

        async def keys(after: str | None) -> list[KeyRecord]:
            return await directory.list_keys(tenant.id, after=after, limit=MAX_PAGE)

        known = _Known(tenant)
        known.projects = {project.name: project for project in await all_pages(projects, lambda record: record.name)}
        found = await all_pages(keys, lambda record: record.public_id)
        known.all_keys = [key for key in found if key.revoked_at is None]
        known.keys = {key.name: key for key in known.all_keys}
        known.limits = {
            (limit.subject, limit.target, limit.metric, limit.window): limit
            for limit in await directory.list_limits(tenant.id)
        }
        return known

    def _tenant(self, entry: TenantEntry, old: TenantRecord | None) -> list[Step]:
        values = {name: getattr(entry, name) for name in _SETTINGS if getattr(entry, name) is not UNSET}
        name = entry.name
        if old is None:
            settings = at(f"tenant {name!r}", lambda: check_settings(TenantSettings(**values)))
            details = tuple(f"{setting} = {shown(getattr(settings, setting))}" for setting in _SETTINGS)
            return [
                Step("+", f"tenant {check_name('tenant', name)}", lambda: self._create_tenant(name, settings), details)
            ]
        changed = {setting: value for setting, value in values.items() if value != getattr(old, setting)}
        if not changed:
            return []
        merged = {setting: getattr(old, setting) for setting in _SETTINGS} | changed
        at(f"tenant {name!r}", lambda: check_settings(TenantSettings(**merged)))
        return [Step("~", f"tenant {name}", lambda: self._update_tenant(old, changed), differences(old, changed))]

    async def _create_tenant(self, name: str, settings: TenantSettings) -> None:
        self._tell_webhook(await self._directory.create_tenant(self._actor, name, settings=settings))

    async def _update_tenant(self, old: TenantRecord, changed: dict[str, Any]) -> None:
        change = TenantChange(**changed)
        self._tell_webhook(await self._directory.update_tenant(self._actor, old.id, change, if_version=old.version))

    def _tell_webhook(self, record: TenantRecord) -> None:
        if record.webhook_secret is not None:
            self._tell_secret(f"{record.name} webhook", record.webhook_secret)

    def _projects(self, entry: TenantEntry, known: _Known) -> tuple[list[Step], list[Step]]:
        wanted = entry.projects or []
        steps = []
        for name in wanted:
            old = known.projects.get(name)
            if old is not None and old.archived_at is not None:
                raise StateConflict(f"project {name!r} of tenant {entry.name!r} is archived; choose another name")
            if old is None and name != DEFAULT_PROJECT:
                check_name("project", name)
                steps.append(Step("+", f"project {entry.name}/{name}", self._project_maker(entry.name, name)))
        removals = [
            Step("-", f"project {entry.name}/{name}", self._project_archiver(project))
            for name, project in known.projects.items()
            if name not in wanted and name != DEFAULT_PROJECT and project.archived_at is None
        ]
        return steps, removals

    def _project_maker(self, tenant: str, name: str) -> Any:
        return lambda: self._directory.create_project(self._actor, tenant, name)

    def _project_archiver(self, project: ProjectRecord) -> Any:
        return lambda: self._directory.archive_project(
            self._actor, project.tenant_id, project.id, if_version=project.version
        )

    def _keys(self, entry: TenantEntry, known: _Known) -> tuple[list[Step], list[Step]]:
        wanted = entry.keys or []
        steps = [step for key in wanted if (step := self._key(entry.name, key, known.keys.get(key.name)))]
        names = {key.name for key in wanted}
        removals = [
            Step("-", f"key {entry.name}/{key.name} ({key.public_id})", self._key_revoker(key))
            for key in known.all_keys
            if key.name not in names
        ]
        return steps, removals

    def _key(self, tenant: str, entry: KeyEntry, old: KeyRecord | None) -> Step | None:
        values = {name: value for name, value in msgspec.structs.asdict(entry).items() if value is not UNSET}
        del values["name"]
        project = values.pop("project", None)
        what = f"key {tenant}/{entry.name}"
        at(what, lambda: _check_key(entry, values))
        expires_at = values.get("expires_at")
        if expires_at is not None and (old is None or expires_at != old.expires_at):
            at(what, lambda: check_expiry(expires_at, self._clock.now()))
        if old is None:
            details = [f"project = {project or DEFAULT_PROJECT}"]
            details += [f"{name} = {shown(value)}" for name, value in values.items()]
            return Step(
                "+", what, lambda: self._issue(tenant, entry.name, project or DEFAULT_PROJECT, values), tuple(details)
            )
        if project is not None and project not in (old.project_name, str(old.project_id)):
            raise StateConflict(
                f"the {what} belongs to the project {old.project_name!r}, where it stays; for {project!r} name "
                "another key"
            )
        changed = {name: value for name, value in values.items() if value != getattr(old, name)}
        if not changed:
            return None
        change = KeyChange(**changed)
        return Step(
            "~",
            what,
            lambda: self._directory.update_key(
                self._actor, old.public_id, change, if_version=old.version, tenant=old.tenant_id
            ),
            differences(old, changed),
        )

    async def _issue(self, tenant: str, name: str, project: str, values: dict[str, Any]) -> None:
        text, record = await self._directory.create_key(self._actor, tenant, name, project=project, **values)
        self._issued[tenant, name] = record.public_id
        self._tell_secret(f"{tenant}/{name}", text)

    def _key_revoker(self, key: KeyRecord) -> Any:
        return lambda: self._directory.revoke_key(
            self._actor, key.public_id, if_version=key.version, tenant=key.tenant_id
        )

    def _limits(self, entry: TenantEntry, known: _Known, *, of_keys: bool = False) -> tuple[list[Step], list[Step]]:
        steps, kept = [], set()
        for limit in entry.limits or []:
            if (limit.subject == "key") != of_keys:
                continue
            identity = self._identity(entry, limit, known)
            if identity is not None and identity in kept:
                raise ConfigurationError(
                    f"tenant {entry.name!r}: a limit of {limit.subject} {limit.target!r} is there twice, once by its "
                    "name and once by its id; write it once"
                )
            if identity is not None:
                kept.add(identity)
            old = known.limits.get(identity) if identity is not None else None
            if step := self._limit(entry.name, limit, old):
                steps.append(step)
        removals = [
            Step("-", f"limit {entry.name}: {_limit_name(old.subject, old.target, old)}", self._limit_lifter(old))
            for identity, old in known.limits.items()
            if identity not in kept and (old.subject == "key") == of_keys
        ]
        return steps, removals

    def _limits_of_keys(self, entry: TenantEntry, known: _Known) -> tuple[list[Step], list[Step]]:
        return self._limits(entry, known, of_keys=True)

    def _identity(self, entry: TenantEntry, limit: LimitEntry, known: _Known) -> _Identity | None:
        """As the limit is stored; None: what it is of is yet to be made, and so is the limit."""
        target = limit.target
        if limit.subject == "project":
            project = next((p for p in known.projects.values() if target in (p.name, str(p.id))), None)
            if project is None and target not in (entry.projects or []) and target != DEFAULT_PROJECT:
                raise ConfigurationError(f"tenant {entry.name!r} has no project {target!r} that could be limited")
            if project is None:
                return None
            target = str(project.id)
        elif limit.subject == "key":
            key = known.keys.get(target) or next((k for k in known.all_keys if k.public_id == target), None)
            if key is None and all(one.name != target for one in entry.keys or []):
                raise ConfigurationError(f"tenant {entry.name!r} has no key {target!r} that could be limited")
            if key is None:
                return None
            target = key.public_id
        elif limit.subject == "end_user" and target:
            if known.tenant is None:
                return None
            if self._secret_key is None:
                raise ConfigurationError("to limit one end user set PENSTOCK_SECRET_KEY, as the gateways have it")
            target = end_user_hash(self._secret_key, known.tenant.id, target)
        return limit.subject, target, limit.metric, limit.window

    def _limit(self, tenant: str, entry: LimitEntry, old: LimitRecord | None) -> Step | None:
        spec = entry.spec()
        what = f"limit {tenant}: {_limit_name(entry.subject, entry.target, spec)}"
        values = {"amount": spec.amount, "hard": spec.hard, "thresholds": spec.thresholds}
        if old is None:
            details = tuple(f"{name} = {_shown(spec, name, value)}" for name, value in values.items())
            return Step("+", what, lambda: self._set_limit(tenant, spec, None), details)
        changed = {name: value for name, value in values.items() if value != getattr(old, name)}
        if not changed:
            return None
        details = tuple(
            f"{name}: {_shown(spec, name, getattr(old, name))} -> {_shown(spec, name, value)}"
            for name, value in changed.items()
        )
        return Step("~", what, lambda: self._set_limit(tenant, spec, old), details)

    async def _set_limit(self, tenant: str, spec: LimitSpec, old: LimitRecord | None) -> None:
        if old is not None:
            # By the target as it is stored, but of an end user, whose id is hashed anew.
            target = spec.target if spec.subject == "end_user" else old.target
            stored = msgspec.structs.replace(spec, target=target)
            await self._directory.set_limit(self._actor, tenant, stored, if_version=old.version)
            return
        if spec.subject == "key":
            issued = self._issued.get((tenant, spec.target)) or await self._public_id(tenant, spec.target)
            spec = msgspec.structs.replace(spec, target=issued)
        await self._directory.create_limit(self._actor, tenant, spec)

    async def _public_id(self, tenant: str, name: str) -> str:
        known = await self._read(await self._directory.tenant(tenant))
        return known.keys[name].public_id if name in known.keys else name

    def _limit_lifter(self, old: LimitRecord) -> Any:
        return lambda: self._directory.delete_limit(self._actor, old.tenant_id, old.id, if_version=old.version)


def _check_key(entry: KeyEntry, values: dict[str, Any]) -> None:
    check_name("key", entry.name)
    if "scopes" in values:
        check_scopes(values["scopes"])
    if "allowed_models" in values:
        check_names("route", values["allowed_models"])
    check_cap("max_context_tokens", values.get("max_context_tokens"))
    check_cap("max_output_tokens", values.get("max_output_tokens"))


def _limit_name(subject: str, target: str, limit: LimitSpec | LimitRecord) -> str:
    whose = subject.replace("_", " ")
    if subject == "end_user" and not target:
        whose = "each end user"
    per = f" per {limit.window}" if limit.window else ""
    return " ".join(filter(None, (f"{limit.metric}{per} of", whose, target)))


def _shown(spec: LimitSpec, name: str, value: Any) -> str:
    return f"{usd_text(value)} USD" if name == "amount" and spec.metric == "budget" else shown(value)
