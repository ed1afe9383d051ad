"""Prices of hosted models, from the data that the package ``genai-prices`` brings along. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from difflib import get_close_matches
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from gateway.billing.price_spec import Basis, PriceSpec, parse_rate
from gateway.tenants.records import ConfigurationError

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, Provider

_RATES = {
    "input_usd_per_mtok": ("input_mtok", 1),
    "output_usd_per_mtok": ("output_mtok", 1),
    "cached_input_usd_per_mtok": ("cache_read_mtok", 1),
    "cache_write_usd_per_mtok": ("cache_write_mtok", 1),
    "reasoning_usd_per_mtok": ("output_reasoning_mtok", 1),
    "usd_per_request": ("requests_kcount", 1000),
}
"""Our rate, its name in the package, and for how many of ours that is the price."""
_NANO = Decimal("0.000000001")


@dataclass(frozen=True, slots=True)
class HostedPrice:
    """A hosted model's price as ours can hold it, and what ours cannot: each a sentence for who imports it."""

    spec: PriceSpec
    notes: tuple[str, ...]


def hosted_price(
    route: str,
    provider: str,
    model: str,
    at: datetime,
    *,
    tenant: str | None = None,
    basis: Basis = "charge",
    effective_from: datetime | None = None,
    longest_prompt: int | None = None,
) -> HostedPrice:
    """The price of ``model`` at ``provider`` in force at ``at``, as a price of ``route``.

    Of prices that depend on a prompt's length or the hour, the dearest is taken; no prompt has more than
    ``longest_prompt`` tokens. Raises ConfigurationError for a model that is unknown, or not priced by tokens. Slow the
    first time, when the package loads its data.
    """
    owner, found = _find(provider, model)
    notes = [] if found.id == model else [f"{model!r} is listed as {owner.id}/{found.id}."]
    prices = _in_force(found, at, notes)
    names = {name for price in prices for name, value in vars(price).items() if value is not None}
    if "input_mtok" not in names:
        raise ConfigurationError(
            f"{owner.id}/{found.id} is not priced by tokens ({', '.join(sorted(names)) or 'no price at all'}); set a "
            f"price by hand: penstock price set {route}"
        )
    rates: dict[str, Any] = {}
    tiers: set[int] = set()
    for ours, (theirs, per) in _RATES.items():
        if theirs in names:
            dearest = _dearest(prices, theirs, longest_prompt, tiers)
            rates[ours] = parse_rate(ours, (dearest / per).quantize(_NANO, ROUND_CEILING))
    if tiers:
        starts = ", ".join(f"{start:,}" for start in sorted(tiers))
        notes.append(f"It depends on the prompt's length (other rates above {starts} tokens); the dearest is taken.")
    if "output_usd_per_mtok" not in rates:
        rates["output_usd_per_mtok"] = Decimal(0)
        notes.append("It has no price for output, which is taken as free.")
    if left := names - {theirs for theirs, _ in _RATES.values()}:
        notes.append(f"Not imported, because no price here has such kinds: {', '.join(sorted(left))}.")
    source = f"genai-prices {version('genai-prices')}: {owner.id}/{found.id}"
    spec = PriceSpec(route=route, tenant=tenant, basis=basis, effective_from=effective_from, source=source, **rates)
    return HostedPrice(spec, tuple(notes))


def _find(provider: str, model: str) -> tuple[Provider, ModelInfo]:
    from genai_prices.data import providers

    by_id = {one.id: one for one in providers}
    owner = by_id.get(provider)
    if owner is None:
        raise ConfigurationError(f"genai-prices knows no provider {provider[:100]!r}{_near(provider, by_id)}")
    models = {one.id: one for one in owner.models}
    found = models.get(model) or owner.find_model(model)
    if found is None:
        raise ConfigurationError(f"genai-prices knows no model {model[:100]!r} of {provider}{_near(model, models)}")
    return owner, found


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name[:100], list(known), n=5, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else "; see its documentation for those it knows"


def _in_force(model: ModelInfo, at: datetime, notes: list[str]) -> list[ModelPrice]:
    """The price of that day; several, if it depends on the hour."""
    from genai_prices.types import ConditionalPrice, StartDateConstraint, TimeOfDateConstraint

    if not isinstance(model.prices, list):
        return [model.prices]
    prices: list[ModelPrice] = []
    conditional: ConditionalPrice
    for conditional in reversed(model.prices):
        constraint = conditional.constraint
        if isinstance(constraint, StartDateConstraint) and not constraint.active(at):
            notes.append(f"It changes on {constraint.start_date.isoformat()}; import it again for then.")
            continue
        prices.append(conditional.prices)
        if not isinstance(constraint, TimeOfDateConstraint):
            break
    if len(prices) > 1:
        notes.append("It depends on the time of day; the dearest is taken.")
    return prices or [model.prices[0].prices]


def _dearest(prices: list[ModelPrice], name: str, longest_prompt: int | None, tiers: set[int]) -> Decimal:
    """``tiers``: starts of those within reach are added."""
    from genai_prices.types import TieredPrices

    rates: list[Decimal] = []
    for price in prices:
        rate = getattr(price, name)
        if isinstance(rate, TieredPrices):
            within = [tier for tier in rate.tiers if longest_prompt is None or tier.start < longest_prompt]
            rates += [rate.base, *(tier.price for tier in within)]
            tiers.update(tier.start for tier in within)
        elif rate is not None:
            rates.append(rate)
    return max(rates)
