"""The amount of a limit as people write it: a count, or USD of a budget, which are text so that no digit is lost."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from gateway.billing.usage import parse_usd
from gateway.tenants.principal import Metric
from gateway.tenants.records import InvalidField
from gateway.tenants.specs import MAX_AMOUNT


def limit_amount(metric: Metric, amount: int | UnsetType, amount_usd: str | UnsetType) -> int | UnsetType:
    """The one that goes with the metric, a budget's in nano-USD. Raises InvalidField."""
    if metric != "budget":
        if amount_usd is not UNSET:
            raise InvalidField("amount_usd", f"a limit of {metric} has an amount, not USD")
        return amount
    if amount is not UNSET:
        raise InvalidField("amount", "give that of a budget as amount_usd, text in USD")
    if amount_usd is UNSET:
        return UNSET
    try:
        nano_usd = parse_usd(amount_usd)
    except ValueError as fault:
        raise InvalidField("amount_usd", str(fault)) from None
    if nano_usd > MAX_AMOUNT:
        raise InvalidField("amount_usd", "a budget is 9,000,000 USD at most")
    return nano_usd


def required_amount(metric: Metric, amount: int | UnsetType, amount_usd: str | UnsetType) -> int:
    """As ``limit_amount``, where one must be given. Raises InvalidField."""
    found = limit_amount(metric, amount, amount_usd)
    if found is UNSET:
        raise InvalidField("amount_usd" if metric == "budget" else "amount", f"a limit of {metric} needs it")
    return found
