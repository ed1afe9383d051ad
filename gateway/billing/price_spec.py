"""A price as an administrator gives it, and what cannot be meant."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec

from gateway.tenants.records import ConfigurationError

Basis = Literal["charge", "cost"]
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
LATEST = datetime(2200, 1, 1, tzinfo=UTC)
MAX_CEILING_S = 1_000_000.0
MAX_SOURCE = 200
_TOKENS = (Decimal("0.0001"), Decimal(10_000), "USD per million tokens, not per token or thousand")
_PIECES = (Decimal("0.000001"), Decimal(1_000), "USD for one, not for a thousand")
_COMPUTE = (Decimal("0.001"), Decimal(1_000), "USD per hour of one device, not per second")
RATES = {
    "input_usd_per_mtok": _TOKENS,
    "output_usd_per_mtok": _TOKENS,
    "cached_input_usd_per_mtok": _TOKENS,
    "cache_write_usd_per_mtok": _TOKENS,
    "reasoning_usd_per_mtok": _TOKENS,
    "usd_per_request": _PIECES,
    "usd_per_image": _PIECES,
    "compute_usd_per_hour": _COMPUTE,
}
"""Least and largest rate that can be meant, besides 0, and what it counts."""


class PriceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price to be set. Fields as in ``Price``; rates are read exactly."""

    route: str
    tenant: str | None = None
    """Name or id of the tenant whose own price it is; None: the list price."""
    basis: Basis = "charge"
    input_usd_per_mtok: Decimal
    output_usd_per_mtok: Decimal
    cached_input_usd_per_mtok: Decimal | None = None
    cache_write_usd_per_mtok: Decimal | None = None
    reasoning_usd_per_mtok: Decimal | None = None
    usd_per_request: Decimal | None = None
    usd_per_image: Decimal | None = None
    compute_usd_per_hour: Decimal | None = None
    compute_ceiling_s: float | None = None
    effective_from: datetime | None = None
    """None: from now on."""
    source: str | None = None


def parse_rate(name: str, value: Decimal | int | str) -> Decimal:
    """The rate ``name`` of RATES, exactly. Free is 0. Raises ConfigurationError for what is no rate or absurd.

    The least rate is one that nobody asks: below it, a price for one token was taken for one for a million.
    """
    least, most, unit = RATES[name]
    try:
        rate = Decimal(value)
    except InvalidOperation:
        raise ConfigurationError(f"{str(value)[:50]!r} is not a price; write {name} in {unit}, as 0.15") from None
    if not rate.is_finite() or not (rate == 0 or least <= rate <= most):
        raise ConfigurationError(f"{name} of {str(value)[:50]} is out of range: use 0, or {least} to {most} ({unit})")
    if rate != round(rate, 9):
        raise ConfigurationError(f"{name} has at most 9 decimal places")
    return rate


def checked(spec: PriceSpec) -> PriceSpec:
    """``spec`` with its rates as they are kept. Raises ConfigurationError."""
    given = {name: rate for name in RATES if (rate := getattr(spec, name)) is not None}
    rates = {name: parse_rate(name, rate) for name, rate in given.items()}
    if spec.basis not in ("charge", "cost"):
        raise ConfigurationError("the basis of a price is `charge` (what tenants pay) or `cost` (what it costs you)")
    if spec.basis == "cost" and spec.tenant is not None:
        raise ConfigurationError("what a route costs you does not depend on the tenant; leave the tenant out")
    if (spec.compute_usd_per_hour is None) != (spec.compute_ceiling_s is None):
        raise ConfigurationError(
            "compute_usd_per_hour and compute_ceiling_s go together: the ceiling is how many device seconds of it one "
            "request reserves"
        )
    if spec.compute_ceiling_s is not None and not 0 < spec.compute_ceiling_s <= MAX_CEILING_S:
        raise ConfigurationError(f"compute_ceiling_s must be above 0 and at most {MAX_CEILING_S:.0f} device seconds")
    begin = spec.effective_from
    if begin is not None:
        if begin.tzinfo is None:
            raise ConfigurationError("the begin of a price needs a time zone: write 2027-01-01T00:00:00Z")
        if not EARLIEST <= begin < LATEST:
            raise ConfigurationError(f"a price begins from {EARLIEST:%Y} to {LATEST:%Y}, not {begin.isoformat()}")
    if spec.source is not None and not (0 < len(spec.source) <= MAX_SOURCE and spec.source.isprintable()):
        raise ConfigurationError(f"the source of a price has 1 to {MAX_SOURCE} printable characters")
    return msgspec.structs.replace(spec, **rates)
