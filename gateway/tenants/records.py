"""Tenants and keys as administrators see them, what can be wrong with a change, and the checks of its values."""

from __future__ import annotations

import re
import zoneinfo
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from gateway.tenants.principal import Limits

MAX_AMOUNT = 2**53 - 1
"""Largest amount in nano-USD (nine million USD): Redis scripts count in doubles."""
SCOPES = frozenset({"inference", "usage:read"})
"""What a tenant's key may be allowed. An admin's key has the scope ``admin`` and belongs to no tenant."""
PERIODS = ("day", "week", "month", "total")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,99}", re.ASCII)
_MAX_COUNT = 2**31 - 1


class InvalidKey(Exception):
    """No valid key: missing, malformed, unknown, expired and revoked are not told apart."""

    def __init__(self) -> None:
        super().__init__("the API key is not valid")


class ConfigurationError(Exception):
    """A change that cannot be made; the message says why and what to do."""


class UnknownTenant(ConfigurationError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no tenant {name!r}; `penstock tenant list` shows those there are")


class TenantExists(ConfigurationError):
    def __init__(self, name: str) -> None:
        super().__init__(f"a tenant {name!r} exists already; choose another name")


class UnknownKey(ConfigurationError):
    def __init__(self, public_id: str) -> None:
        super().__init__(f"there is no key {public_id!r}; `penstock key list` shows those there are")


@dataclass(frozen=True, slots=True)
class TenantRecord:
    id: UUID
    name: str
    generation: int
    limits: Limits
    created_at: datetime


@dataclass(frozen=True, slots=True)
class KeyRecord:
    public_id: str
    tenant_id: UUID | None
    """None: an admin's key."""
    name: str
    scopes: frozenset[str]
    allowed_models: frozenset[str] | None
    """None: every route."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


def is_name(text: str) -> bool:
    """Whether anything can bear this name. What cannot need not be looked for, and may not even be text to Postgres."""
    return _NAME.fullmatch(text) is not None


def check_name(kind: str, name: str) -> str:
    """``name``, if it can be one. Plain names keep reports, exports, shells and Redis keys free of surprises."""
    if not is_name(name):
        raise ConfigurationError(
            f"{name[:100]!r} cannot be the name of a {kind}: use 1 to 100 letters, digits and . _ - / :, beginning "
            "with a letter or digit"
        )
    return name


def check_limits(limits: Limits) -> Limits:
    """``limits``, if they make sense."""
    for field in ("requests_per_minute", "max_concurrent"):
        value = getattr(limits, field)
        if value is not None and not 0 <= value <= _MAX_COUNT:
            raise ConfigurationError(f"{field} must be between 0 and {_MAX_COUNT}, not {value}")
    if budget := limits.budget:
        if not 0 <= budget.amount <= MAX_AMOUNT:
            raise ConfigurationError("a budget must be between 0 and 9,000,000 USD")
        if budget.period not in PERIODS:
            raise ConfigurationError(f"a budget's period is one of {', '.join(PERIODS)}, not {budget.period!r}")
        try:
            zoneinfo.ZoneInfo(budget.timezone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigurationError(
                f"{budget.timezone[:100]!r} is not a time zone; use an IANA name such as Europe/Berlin, or UTC"
            ) from None
    return limits


def check_scopes(scopes: frozenset[str]) -> frozenset[str]:
    """``scopes``, if a tenant's key may have them."""
    if not scopes or not scopes <= SCOPES:
        raise ConfigurationError(f"a tenant's key has one or more of the scopes {', '.join(sorted(SCOPES))}")
    return scopes


def check_expiry(expires_at: datetime | None, now: datetime) -> datetime | None:
    """``expires_at``, if it names one moment, in the future."""
    if expires_at is not None:
        if expires_at.tzinfo is None:
            raise ConfigurationError("an expiry needs a time zone: write 2027-01-01T00:00:00Z")
        if expires_at <= now:
            raise ConfigurationError("an expiry must lie in the future; revoke a key to end it now")
    return expires_at
