"""What a change asks for, and the checks of its values. Each check raises ConfigurationError with the remedy."""

from __future__ import annotations

import math
import zoneinfo
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.redaction import compile_patterns
from gateway.tenants.principal import BudgetPeriod, Metric, RateWindow, RedisLossPolicy, Subject
from gateway.tenants.records import ConfigurationError, InvalidField, check_name, is_name

P = TypeVar("P", CachePolicy, PromptLogPolicy)
MAX_AMOUNT = 2**53 - 1
"""Largest amount in nano-USD (nine million USD): Redis scripts count in doubles."""
SCOPES = frozenset({"inference", "usage:read", "prompts:read"})
"""What a tenant's key may be allowed. An admin's key has the scope ``admin`` and belongs to no tenant."""
PERIODS: tuple[BudgetPeriod, ...] = ("day", "week", "month", "total")
RATE_WINDOWS: tuple[RateWindow, ...] = ("minute", "hour", "day")
ROLES = ("owner", "admin", "viewer")
MAX_PAGE = 1000
MAX_GRACE_S = 30 * 24 * 3600.0
_WINDOWS: dict[Metric, tuple[RateWindow | BudgetPeriod | None, ...]] = {
    "requests": RATE_WINDOWS,
    "tokens": RATE_WINDOWS,
    "concurrent": (None,),
    "budget": PERIODS,
}
_MOST: dict[Metric, int] = {
    "requests": 2**31 - 1,
    "tokens": 10**12,
    "concurrent": 2**31 - 1,
    "budget": MAX_AMOUNT,
}
_MACHINE_ZONES = frozenset({"localtime", "posixrules", "Factory"})
_MAX_TOKENS = 100_000_000
_MAX_THRESHOLDS = 20
_MAX_END_USER = 1000
_MAX_URL = 2000
_MAX_FILTER = 200
_LONGEST_EXPIRY = timedelta(days=36_525)


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timezone: str = "UTC"
    """IANA name; budget periods begin and end at local midnight there."""
    redis_loss: RedisLossPolicy = "fail_closed"
    markup_bp: int = 0
    """Hundredths of a percent, added to list prices."""
    weight: float = 1.0
    """Share among tenants of a worker's fair queue."""
    webhook_url: str | None = None
    answer_cache: CachePolicy = NO_POLICY
    prompt_log: PromptLogPolicy = NO_LOG


class TenantChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left UNSET stays. A new webhook URL gets a new secret."""

    name: str | UnsetType = UNSET
    timezone: str | UnsetType = UNSET
    redis_loss: RedisLossPolicy | UnsetType = UNSET
    markup_bp: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    webhook_url: str | UnsetType | None = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET
    prompt_log: PromptLogPolicy | UnsetType = UNSET


class KeyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left UNSET stays. Of an admin's key only ``name`` and ``expires_at`` can be changed."""

    name: str | UnsetType = UNSET
    scopes: frozenset[str] | UnsetType = UNSET
    allowed_models: frozenset[str] | UnsetType | None = UNSET
    max_context_tokens: int | UnsetType | None = UNSET
    max_output_tokens: int | UnsetType | None = UNSET
    expires_at: datetime | UnsetType | None = UNSET


class LimitSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A limit as it is asked for. A tenant has one at most of each subject, target, metric and window."""

    subject: Subject = "tenant"
    target: str = ""
    """A project's name or id; a key's public id; a route's name; an end user as clients name it, or '' for each."""
    metric: Metric
    window: RateWindow | BudgetPeriod | None = None
    amount: int
    """Requests, tokens, slots, or nano-USD."""
    hard: bool = True
    thresholds: tuple[int, ...] = ()


class LimitChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left UNSET stays."""

    amount: int | UnsetType = UNSET
    hard: bool | UnsetType = UNSET
    thresholds: tuple[int, ...] | UnsetType = UNSET


def check_names(kind: str, names: Collection[str]) -> list[str]:
    return sorted({check_name(kind, name) for name in names})


def check_timezone(name: str) -> str:
    try:
        # "localtime" and the like are another zone, or none, on the next machine.
        if name in _MACHINE_ZONES or name.startswith(("posix/", "right/")):
            raise ValueError(name)
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigurationError(
            f"{name[:100]!r} is not a time zone; use an IANA name such as Europe/Berlin, or UTC"
        ) from None
    return name


def check_settings(settings: TenantSettings) -> TenantSettings:
    check_timezone(settings.timezone)
    if settings.redis_loss not in ("fail_closed", "fail_open"):
        raise ConfigurationError("redis_loss must be `fail_closed` or `fail_open`")
    if not -10_000 <= settings.markup_bp <= 1_000_000:
        raise ConfigurationError("a mark-up must be between -100 % and 10,000 %")
    if not (math.isfinite(settings.weight) and 0.01 <= settings.weight <= 1000):
        raise ConfigurationError("a weight must be between 0.01 and 1000")
    if settings.webhook_url is not None:
        _check_url(settings.webhook_url)
    check_policy("answer_cache", settings.answer_cache)
    check_policy("prompt_log", settings.prompt_log)
    try:
        compile_patterns(settings.prompt_log.patterns)
    except ValueError as fault:
        raise InvalidField("prompt_log", str(fault)) from fault
    return settings


def check_narrower(policy: CachePolicy) -> CachePolicy:
    """As ``check_policy``, of a project or a route."""
    if policy.max_tenant_bytes is not None:
        raise InvalidField("answer_cache", "max_tenant_bytes is for the tenant to say; set it there")
    return check_policy("answer_cache", policy)


def check_policy(name: str, policy: P) -> P:
    """``policy``, if its values are within their bounds."""
    try:
        return msgspec.convert(msgspec.to_builtins(policy), type(policy))
    except msgspec.ValidationError as fault:
        raise InvalidField(name, str(fault)) from fault


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError("a webhook's URL is written https://host/path, in ASCII, of 2,000 characters at most")
    if "@" in parts.netloc:
        raise ConfigurationError("a webhook's URL must hold no user or password; its messages are signed instead")


def check_scopes(scopes: Collection[str]) -> frozenset[str]:
    """``scopes``, if a tenant's key may have them."""
    if not scopes or not frozenset(scopes) <= SCOPES:
        raise ConfigurationError(f"a tenant's key has one or more of the scopes {', '.join(sorted(SCOPES))}")
    return frozenset(scopes)


def check_cap(name: Literal["max_context_tokens", "max_output_tokens"], tokens: int | None) -> int | None:
    if tokens is not None and not 1 <= tokens <= _MAX_TOKENS:
        raise ConfigurationError(f"{name} must be between 1 and {_MAX_TOKENS} tokens, not {tokens}")
    return tokens


def check_expiry(expires_at: datetime | None, now: datetime) -> datetime | None:
    """``expires_at``, if it names one moment, in the future."""
    if expires_at is not None:
        if expires_at.tzinfo is None:
            raise ConfigurationError("an expiry needs a time zone: write 2027-01-01T00:00:00Z")
        if expires_at <= now:
            raise ConfigurationError("an expiry must lie in the future; revoke a key to end it now")
        if expires_at - now > _LONGEST_EXPIRY:
            raise ConfigurationError("an expiry lies within 100 years; leave it out for a key that never expires")
    return expires_at


def check_grace(grace_s: float) -> float:
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ConfigurationError("the grace of a rotation is between 0 seconds and 30 days")
    return grace_s


def check_page(limit: int, after: str | None = None) -> int:
    """``limit``, if a page may be so long, and ``after`` can be the name or id of what was last on the page before."""
    if not 1 <= limit <= MAX_PAGE:
        raise ConfigurationError(f"a page has between 1 and {MAX_PAGE} entries, not {limit}")
    if after is not None and not is_name(after):
        raise ConfigurationError("a page begins after the name or id of the last entry of the page before")
    return limit


def check_filter(text: str | None) -> str | None:
    """``text``, if Postgres can compare with it."""
    try:
        good = text is None or (len(text) <= _MAX_FILTER and b"\0" not in text.encode())
    except UnicodeEncodeError:
        good = False
    if not good:
        raise ConfigurationError(f"what is looked for is plain text of {_MAX_FILTER} characters at most")
    return text


def check_limit(spec: LimitSpec) -> LimitSpec:
    """``spec``, if its parts go together; whether its target is there is another matter."""
    windows = _WINDOWS.get(spec.metric)
    if windows is None:
        raise ConfigurationError(f"what is limited is one of {', '.join(_WINDOWS)}, not {spec.metric!r}")
    if spec.window not in windows:
        if windows == (None,):
            raise ConfigurationError("a limit of concurrent requests has no window")
        known = ", ".join(str(window) for window in windows)
        raise ConfigurationError(f"a limit of {spec.metric} is per {known}, not {spec.window!r}")
    if not 0 <= spec.amount <= _MOST[spec.metric]:
        if spec.metric == "budget":
            raise ConfigurationError("a budget must be between 0 and 9,000,000 USD")
        raise ConfigurationError(
            f"a limit of {spec.metric} must be between 0 and {_MOST[spec.metric]}, not {spec.amount}"
        )
    _check_target(spec)
    _check_thresholds(spec.metric, spec.thresholds)
    return spec


def _check_target(spec: LimitSpec) -> None:
    if spec.subject == "tenant":
        if spec.target:
            raise ConfigurationError("a limit of the whole tenant has no target")
    elif spec.subject == "end_user":
        if len(spec.target) > _MAX_END_USER:
            raise ConfigurationError(f"the id of an end user has at most {_MAX_END_USER} characters")
    elif spec.subject not in ("project", "key", "model"):
        raise ConfigurationError(f"a limit is of tenant, project, key, end_user or model, not {spec.subject!r}")
    elif not is_name(spec.target):
        raise ConfigurationError(f"say which {spec.subject} the limit is of, by its name or id")


def _check_thresholds(metric: Metric, thresholds: Sequence[int]) -> None:
    if thresholds and metric != "budget":
        raise ConfigurationError("thresholds belong to budgets")
    if len(thresholds) > _MAX_THRESHOLDS or not all(1 <= percent <= 1000 for percent in thresholds):
        raise ConfigurationError(f"thresholds are {_MAX_THRESHOLDS} at most, each between 1 and 1000 percent")
