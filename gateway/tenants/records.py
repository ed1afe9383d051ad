"""Tenants, projects, keys and limits as administrators see them, and what can be wrong with a change."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.tenants.principal import AdminRole, BudgetPeriod, Metric, RateWindow, RedisLossPolicy, Subject

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*"
"""No part between slashes is empty or begins with a dot: such a name would be another one in a URL's path."""
MAX_NAME = 100
_NAME = re.compile(NAME_PATTERN, re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)


class InvalidKey(Exception):
    """No valid key: missing, malformed, unknown, expired, revoked and of an archived tenant are not told apart."""

    def __init__(self) -> None:
        super().__init__("the API key is not valid")


class ConfigurationError(Exception):
    """A change that cannot be made; the message says why and what to do."""


class NotAllowed(ConfigurationError):
    """The actor's role does not allow the change."""


class Unknown(ConfigurationError):
    """What is named is not there, or belongs to another tenant."""


class UnknownTenant(Unknown):
    def __init__(self, ref: str | UUID) -> None:
        super().__init__(f"there is no tenant {_short(ref)}; `penstock tenant list` shows those there are")


class UnknownProject(Unknown):
    def __init__(self, ref: str | UUID, tenant: str) -> None:
        super().__init__(
            f"tenant {tenant!r} has no project {_short(ref)}; `penstock project list --tenant {tenant}` shows them"
        )


class UnknownKey(Unknown):
    def __init__(self, public_id: str) -> None:
        super().__init__(f"there is no key {_short(public_id)}; `penstock key list` shows those there are")


class UnknownLimit(Unknown):
    def __init__(self, limit_id: str | UUID, tenant: str) -> None:
        super().__init__(
            f"tenant {tenant!r} has no limit {_short(limit_id)}; `penstock limit list --tenant {tenant}` shows them"
        )


class InvalidField(ConfigurationError):
    """A value that cannot be; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class StateConflict(ConfigurationError):
    """The change is good, but not in the state that things are in."""


class AlreadyExists(ConfigurationError):
    """Another has the name already."""


class TenantExists(AlreadyExists):
    def __init__(self, name: str) -> None:
        super().__init__(f"a tenant {name!r} exists already; choose another name")


class ProjectExists(AlreadyExists):
    def __init__(self, name: str, tenant: str) -> None:
        super().__init__(f"tenant {tenant!r} has a project {name!r} already; choose another name")


class LimitExists(AlreadyExists):
    def __init__(self, limit_id: UUID) -> None:
        super().__init__(f"there is such a limit already, {limit_id}; change it instead")


class VersionConflict(ConfigurationError):
    """Somebody else changed it since it was read."""

    def __init__(self, kind: str, target: str, expected: int, found: int | None) -> None:
        state = f"has version {found}" if found is not None else "is not there"
        super().__init__(f"{kind} {target!r} {state}, not version {expected}; read it again and repeat the change")
        self.kind = kind
        self.target = target
        self.found = found


class LastOwner(StateConflict):
    def __init__(self) -> None:
        super().__init__(
            "this is the last owner's key: without it nobody could manage administrators' keys. Create another owner's "
            "key first, or revoke it at the console: penstock admin-key revoke"
        )


@dataclass(frozen=True, slots=True)
class TenantRecord:
    id: UUID
    name: str
    version: int
    generation: int
    """Counts changes to the tenant, its projects, keys and limits."""
    created_at: datetime
    archived_at: datetime | None
    """Since then its keys are invalid."""
    timezone: str
    redis_loss: RedisLossPolicy
    markup_bp: int
    weight: float
    webhook_url: str | None
    webhook_secret: str | None = field(default=None, repr=False)
    """With which what is sent to the webhook is signed: only in the answer to the change that set the URL."""
    answer_cache: CachePolicy = NO_POLICY
    prompt_log: PromptLogPolicy = NO_LOG


@dataclass(frozen=True, slots=True)
class ProjectRecord:
    id: UUID
    tenant_id: UUID
    name: str
    version: int
    created_at: datetime
    archived_at: datetime | None
    """Since then its keys are invalid."""
    answer_cache: CachePolicy = NO_POLICY


@dataclass(frozen=True, slots=True)
class KeyRecord:
    public_id: str
    tenant_id: UUID | None
    """None: an admin's key."""
    tenant_name: str | None
    project_id: UUID | None
    project_name: str | None
    name: str
    role: AdminRole | None
    """Of an admin's key."""
    scopes: frozenset[str]
    allowed_models: frozenset[str] | None
    """None: every route."""
    max_context_tokens: int | None
    max_output_tokens: int | None
    version: int
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_until: datetime | None
    """Until then the secret before the last rotation is good, too."""


@dataclass(frozen=True, slots=True)
class LimitRecord:
    id: UUID
    tenant_id: UUID
    subject: Subject
    target: str
    """As in ``Limit``: a project's id, a key's public id, a route, an end user's hash, or ''."""
    metric: Metric
    window: RateWindow | BudgetPeriod | None
    amount: int
    hard: bool
    thresholds: tuple[int, ...]
    version: int
    created_at: datetime


def is_name(text: str) -> bool:
    """Whether anything can bear this name. What cannot need not be looked for, and may not even be text to Postgres."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def as_id(ref: str | UUID) -> UUID | None:
    """The id that ``ref`` is, if it is not a name."""
    if isinstance(ref, UUID):
        return ref
    return UUID(ref) if _UUID.fullmatch(ref) else None


def check_name(kind: str, name: str) -> str:
    """``name``, if it can be one. Plain names keep reports, exports, shells and Redis keys free of surprises."""
    if not is_name(name):
        raise ConfigurationError(
            f"{name[:100]!r} cannot be the name of a {kind}: use 1 to 100 letters, digits and . _ - / :, beginning "
            "with a letter or digit, and between slashes something that does not begin with a dot"
        )
    if _UUID.fullmatch(name):
        raise ConfigurationError(f"{name!r} cannot be the name of a {kind}: it would be taken for an id")
    return name


def _short(ref: str | UUID) -> str:
    return repr(str(ref)[:100])
