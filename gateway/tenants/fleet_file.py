"""A fleet file: pools, backends, routes, prices and tenants as they should be, in TOML."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Hashable, Iterable
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.billing.price_spec import RATES, Basis, PriceSpec, checked, parse_rate
from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.routing.route import Target, UnpricedPolicy
from gateway.tenants.fleet_steps import at
from gateway.tenants.limit_amount import required_amount
from gateway.tenants.principal import BudgetPeriod, Metric, RateWindow, RedisLossPolicy, Scope, Subject
from gateway.tenants.records import ConfigurationError
from gateway.tenants.specs import LimitSpec, check_limit

Moment = Annotated[datetime, Meta(tz=True)]


class BackendEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields as in ``BackendSpec``. What is left out has the usual value in a new one, and stays as it is in another.

    Secrets are not in the file: ``api_key_env``, and the values of ``headers_env``, name environment variables.
    """

    name: str
    pool: str
    brand: str
    base_url: str
    api_key_env: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    """With ``headers_env`` all that it has."""
    headers_env: dict[str, str] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    connect_timeout_s: float | UnsetType = UNSET
    first_byte_timeout_s: float | UnsetType = UNSET
    idle_timeout_s: float | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class TargetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As ``Target``."""

    pool: str
    backend_model: str | UnsetType = UNSET
    """Left out: as the route's name."""
    weight: float = 1.0
    priority: int = 0

    def target(self, route: str) -> Target:
        model = route if self.backend_model is UNSET else self.backend_model
        return Target(self.pool, model, self.weight, self.priority)


class RouteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields as in ``Route``. What is left out has the usual value in a new route, and stays as it is in another."""

    name: str
    pool: str
    context_length: int
    backend_model: str | UnsetType = UNSET
    default_output_tokens: int | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    timeout_s: float | UnsetType = UNSET
    unpriced: UnpricedPolicy | UnsetType = UNSET
    tokenizer: str | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    more_targets: list[TargetEntry] | UnsetType = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET

    def values(self) -> dict[str, Any]:
        """What is given, as ``RouteChange`` has it, and the name."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if self.more_targets is not UNSET:
            given["more_targets"] = tuple(entry.target(self.name) for entry in self.more_targets)
        return given


class PriceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates in USD, as text. Without ``effective_from`` it is the price that should be in force now."""

    route: str
    tenant: str | None = None
    basis: Basis = "charge"
    input_usd_per_mtok: str
    output_usd_per_mtok: str
    cached_input_usd_per_mtok: str | None = None
    cache_write_usd_per_mtok: str | None = None
    reasoning_usd_per_mtok: str | None = None
    usd_per_request: str | None = None
    usd_per_image: str | None = None
    compute_usd_per_hour: str | None = None
    compute_ceiling_s: float | None = None
    effective_from: Moment | None = None

    def spec(self) -> PriceSpec:
        """Raises ConfigurationError."""
        values: dict[str, Any] = msgspec.structs.asdict(self)
        rates = {name: parse_rate(name, values[name]) for name in RATES if values[name] is not None}
        return checked(PriceSpec(**(values | rates)))


class LimitEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As ``LimitSpec``; of a budget ``amount_usd``, as text. The target of a key is the key's name in this file."""

    subject: Subject = "tenant"
    target: str = ""
    metric: Metric
    window: RateWindow | BudgetPeriod | None = None
    amount: int | UnsetType = UNSET
    amount_usd: str | UnsetType = UNSET
    hard: bool = True
    thresholds: tuple[int, ...] = ()

    def spec(self) -> LimitSpec:
        """Raises ConfigurationError."""
        return check_limit(
            LimitSpec(
                subject=self.subject,
                target=self.target,
                metric=self.metric,
                window=self.window,
                amount=required_amount(self.metric, self.amount, self.amount_usd),
                hard=self.hard,
                thresholds=tuple(sorted(set(self.thresholds))),
            )
        )


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key by its name. What is left out has the usual value in a new key, and stays as it is in another."""

    name: str
    project: str | UnsetType = UNSET
    scopes: frozenset[Scope] | UnsetType = UNSET
    allowed_models: frozenset[str] | UnsetType = UNSET
    max_context_tokens: int | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    expires_at: Moment | UnsetType = UNSET


class TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings as in ``TenantSettings``; what is left out stays as it is. A list that is left out is not looked at."""

    name: str
    timezone: str | UnsetType = UNSET
    redis_loss: RedisLossPolicy | UnsetType = UNSET
    markup_bp: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    webhook_url: str | UnsetType = UNSET
    answer_cache: CachePolicy | UnsetType = UNSET
    prompt_log: PromptLogPolicy | UnsetType = UNSET
    projects: list[str] | UnsetType = UNSET
    keys: list[KeyEntry] | UnsetType = UNSET
    limits: list[LimitEntry] | UnsetType = UNSET


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list that is left out is not looked at."""

    pools: list[str] | UnsetType = UNSET
    backends: list[BackendEntry] | UnsetType = UNSET
    routes: list[RouteEntry] | UnsetType = UNSET
    prices: list[PriceEntry] = []
    tenants: list[TenantEntry] = []


def read_fleet_file(text: str) -> FleetFile:
    """Raises ConfigurationError that names the place of the fault."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as fault:
        raise ConfigurationError(f"it is not TOML: {fault}") from fault
    try:
        fleet = msgspec.convert(values, FleetFile)
    except msgspec.ValidationError as fault:
        message, _, place = str(fault).partition(" - at `$")
        if message.endswith("`api_key`"):
            message += "; secrets are not in the file: let api_key_env name an environment variable"
        raise ConfigurationError(f"{_named(values, place.rstrip('`').lstrip('.'))}: {message}") from fault
    _check_once("pool", fleet.pools or ())
    _check_once("backend", (backend.name for backend in fleet.backends or ()))
    _check_once("route", (route.name for route in fleet.routes or ()))
    _check_once("tenant", (tenant.name for tenant in fleet.tenants))
    _check_once("price", ((p.route, p.tenant, p.basis, p.effective_from) for p in fleet.prices))
    for number, price in enumerate(fleet.prices):
        at(f"prices[{number}]", price.spec)
    for tenant in fleet.tenants:
        where = f"tenant {tenant.name!r}"
        _check_once(f"project of {where}", tenant.projects or ())
        _check_once(f"key of {where}", (key.name for key in tenant.keys or ()))
        _check_once(
            f"limit of {where}", ((one.subject, one.target, one.metric, one.window) for one in tenant.limits or ())
        )
        for number, limit in enumerate(tenant.limits or ()):
            at(f"{where}, limits[{number}]", limit.spec)
    return fleet


def _named(values: Any, place: str) -> str:
    """``place`` with the names of what it leads through: ``tenants[0] ('acme').limits[1]``."""
    if not place:
        return "the file"
    shown = []
    for part in place.split("."):
        key, _, index = part.partition("[")
        try:
            values = values[key]
            if index:
                values = values[int(index.rstrip("]"))]
        except (LookupError, TypeError, ValueError):
            values = None
        name = values.get("name") if isinstance(values, dict) else None
        shown.append(f"{part} ({name!r})" if isinstance(name, str) else part)
    return ".".join(shown)


def _check_once(kind: str, names: Iterable[Hashable]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            shown = " ".join(str(part) for part in name if part) if isinstance(name, tuple) else str(name)
            raise ConfigurationError(f"the {kind} {shown!r} is there {count} times; write it once")
