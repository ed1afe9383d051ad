"""What a request costs: a price of every kind, and the tariff of one tenant at one moment.

Amounts are exact until they are rounded once to integer nano-USD: rates have at most nine decimal places, so that
everything is a whole number of 1/3.6e9 nano-USD (a microsecond is 1/3.6e9 of an hour).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from gateway.billing.price_spec import Basis
from gateway.billing.usage import TokenUsage

_PER_RATE = 10**9
"""Rates are counted in whole 1e-9 USD."""
_DENOMINATOR = 3_600_000_000
_PER_TOKEN = _DENOMINATOR // 10**6
_WHOLE_BP = 10_000
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Whole 1e-9 USD per million tokens, per request, per image and per hour."""

    input: int
    output: int
    cached_input: int
    cache_write: int
    reasoning: int
    request: int
    image: int
    compute: int
    ceiling_us: int


@dataclass(frozen=True, slots=True)
class Price:
    """One version of a route's price, in force from ``effective_from`` on until it ends or the next version begins."""

    id: UUID
    route: str
    input_usd_per_mtok: Decimal
    output_usd_per_mtok: Decimal
    effective_from: datetime
    effective_until: datetime | None = None
    """None: until the next version begins."""
    tenant_id: UUID | None = None
    """None: the list price; else the tenant whose own price it is."""
    basis: Basis = "charge"
    """``charge``: what tenants pay; ``cost``: what the backends cost us."""
    cached_input_usd_per_mtok: Decimal | None = None
    """None: as input."""
    cache_write_usd_per_mtok: Decimal | None = None
    """None: as input."""
    reasoning_usd_per_mtok: Decimal | None = None
    """None: as output."""
    usd_per_request: Decimal | None = None
    usd_per_image: Decimal | None = None
    compute_usd_per_hour: Decimal | None = None
    """Of one device, for ``compute_us``."""
    compute_ceiling_s: float | None = None
    """Device seconds that one request reserves. What it takes beyond them is charged all the same."""
    source: str | None = None
    """Where it comes from, as ``genai-prices 0.2.3: openai/gpt-4o``; None: an administrator."""
    _rates: _Rates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        input_, output = _whole(self.input_usd_per_mtok), _whole(self.output_usd_per_mtok)
        rates = _Rates(
            input_,
            output,
            _whole(self.cached_input_usd_per_mtok, input_),
            _whole(self.cache_write_usd_per_mtok, input_),
            _whole(self.reasoning_usd_per_mtok, output),
            _whole(self.usd_per_request, 0),
            _whole(self.usd_per_image, 0),
            _whole(self.compute_usd_per_hour, 0),
            round((self.compute_ceiling_s or 0) * 10**6),
        )
        object.__setattr__(self, "_rates", rates)

    @property
    def withdrawn(self) -> bool:
        """Whether it was ended before it began, and so never is in force."""
        return self.effective_until is not None and self.effective_until <= self.effective_from

    def amount(self, usage: TokenUsage) -> int:
        """Nano-USD for ``usage``, rounded once, half to even."""
        return rounded(self.exact(usage), _DENOMINATOR)

    def bound(self, prompt_tokens: int, output_tokens: int, images: int = 0) -> int:
        """Nano-USD that a request of at most so much can come to, rounded up.

        Each token counts as the dearest kind that it may turn out to be.
        """
        return _rounded_up(self.exact_bound(prompt_tokens, output_tokens, images), _DENOMINATOR)

    def exact(self, usage: TokenUsage) -> int:
        """The amount before rounding, in 1/3.6e9 nano-USD.

        What a backend reports of cached, written and reasoning tokens beyond the tokens they are part of counts not.
        """
        rates = self._rates
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        written = min(usage.cache_write_tokens, usage.prompt_tokens - cached)
        reasoning = min(usage.reasoning_tokens, usage.completion_tokens)
        tokens = (
            (usage.prompt_tokens - cached - written) * rates.input
            + cached * rates.cached_input
            + written * rates.cache_write
            + (usage.completion_tokens - reasoning) * rates.output
            + reasoning * rates.reasoning
        )
        pieces = rates.request + usage.images * rates.image
        return tokens * _PER_TOKEN + pieces * _DENOMINATOR + usage.compute_us * rates.compute

    def exact_bound(self, prompt_tokens: int, output_tokens: int, images: int = 0) -> int:
        """The bound before rounding, in 1/3.6e9 nano-USD."""
        rates = self._rates
        tokens = prompt_tokens * max(rates.input, rates.cached_input, rates.cache_write)
        tokens += output_tokens * max(rates.output, rates.reasoning)
        pieces = rates.request + images * rates.image
        return tokens * _PER_TOKEN + pieces * _DENOMINATOR + rates.ceiling_us * rates.compute


class Tariff(msgspec.Struct, frozen=True):
    """What one tenant pays for a route at one moment, and what it costs us."""

    charge: Price | None
    """None: unpriced; served, if the route's policy allows it, and charged nothing."""
    cost: Price | None
    """None: nobody knows."""
    markup_bp: int = 0
    """Hundredths of a percent, added to the list price; a price of the tenant's own is charged as it is."""

    @property
    def price_id(self) -> UUID | None:
        return self.charge.id if self.charge else None

    @property
    def cost_price_id(self) -> UUID | None:
        """By which the cost is reckoned, if not by ``price_id``."""
        return self.cost.id if self.cost is not self.charge and self.cost and self.cost != self.charge else None

    @property
    def applied_markup_bp(self) -> int:
        """The mark-up that the charge holds."""
        return self.markup_bp if self.charge and self.charge.tenant_id is None else 0

    def charged(self, usage: TokenUsage) -> int:
        """Nano-USD that the tenant pays for ``usage``, rounded once, half to even."""
        if self.charge is None:
            return 0
        return rounded(self.charge.exact(usage) * self._factor, _DENOMINATOR * _WHOLE_BP)

    def cost_of(self, usage: TokenUsage) -> int:
        """Nano-USD that ``usage`` costs us, rounded once, half to even."""
        return self.cost.amount(usage) if self.cost else 0

    def bound(self, prompt_tokens: int, output_tokens: int, images: int = 0) -> int:
        """Nano-USD that the tenant can come to pay for at most so much, rounded up."""
        if self.charge is None:
            return 0
        exact = self.charge.exact_bound(prompt_tokens, output_tokens, images)
        return _rounded_up(exact * self._factor, _DENOMINATOR * _WHOLE_BP)

    @property
    def _factor(self) -> int:
        return _WHOLE_BP + self.applied_markup_bp


class Schedule:
    """What one tenant pays for one route, by the time. It keeps the last tariff for as long as that is in force."""

    def __init__(self, own: Sequence[Price], listed: Sequence[Price], cost: Sequence[Price], markup_bp: int) -> None:
        """Each oldest first."""
        self._own = own
        self._listed = listed
        self._cost = cost
        self._markup_bp = markup_bp
        changes = {price.effective_from for price in (*own, *listed, *cost)}
        changes |= {price.effective_until for price in (*own, *listed, *cost) if price.effective_until is not None}
        self._changes = sorted(changes)
        self._begin = self._end = _LATEST
        self._tariff = Tariff(None, None)

    def at(self, moment: datetime) -> Tariff:
        """Its own price, else the list price with its mark-up. It costs us the cost price, else the list price, else
        what the tenant pays."""
        if not self._begin <= moment < self._end:
            own, listed, cost = (
                in_force(self._own, moment),
                in_force(self._listed, moment),
                in_force(self._cost, moment),
            )
            self._tariff = Tariff(own or listed, cost or listed or own, self._markup_bp)
            index = bisect_right(self._changes, moment)
            self._begin = self._changes[index - 1] if index else _EARLIEST
            self._end = self._changes[index] if index < len(self._changes) else _LATEST
        return self._tariff


def in_force(versions: Sequence[Price], at: datetime) -> Price | None:
    """Of the versions of a price, oldest first."""
    index = bisect_right(versions, at, key=lambda price: price.effective_from)
    if not index:
        return None
    price = versions[index - 1]
    return None if price.effective_until is not None and at >= price.effective_until else price


def _whole(rate: Decimal | None, otherwise: int | None = None) -> int:
    if rate is None:
        assert otherwise is not None
        return otherwise
    whole = int(rate * _PER_RATE)
    if whole != rate * _PER_RATE:
        raise ValueError(f"a rate has at most 9 decimal places, unlike {rate}")
    return whole


def rounded(numerator: int, denominator: int) -> int:
    """The quotient, half to even."""
    quotient, rest = divmod(numerator, denominator)
    return quotient + (2 * rest > denominator or (2 * rest == denominator and quotient % 2))


def _rounded_up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
