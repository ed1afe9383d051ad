from __future__ import annotations

from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.prices import Price, Tariff
from gateway.billing.usage import TokenUsage

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
MTOK = st.decimals("0", "10000", places=9)
PIECE = st.decimals("0", "1000", places=9)
COUNTS = st.integers(0, 10**9)
MARKUPS = st.integers(-10_000, 1_000_000)


def price(input_: Decimal | str = "0", output: Decimal | str = "0", **more: Any) -> Price:
    return Price(UUID(int=1), "m", Decimal(input_), Decimal(output), BEGIN, **more)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    """Prices of every mixture of kinds, dear ones inside cheap ones too."""
    hourly = draw(st.none() | PIECE)
    return price(
        draw(MTOK),
        draw(MTOK),
        cached_input_usd_per_mtok=draw(st.none() | MTOK),
        cache_write_usd_per_mtok=draw(st.none() | MTOK),
        reasoning_usd_per_mtok=draw(st.none() | MTOK),
        usd_per_request=draw(st.none() | PIECE),
        usd_per_image=draw(st.none() | PIECE),
        compute_usd_per_hour=hourly,
        compute_ceiling_s=None if hourly is None else draw(st.integers(1, 10**9)) / 1000,
        tenant_id=draw(st.none() | st.just(UUID(int=3))),
    )


@st.composite
def usages(draw: st.DrawFn, *, compute_us: int = 10**10) -> TokenUsage:
    """Any usage, also one whose parts are said to be more than the whole."""
    return TokenUsage(
        prompt_tokens=draw(COUNTS),
        completion_tokens=draw(COUNTS),
        cached_tokens=draw(COUNTS),
        cache_write_tokens=draw(COUNTS),
        reasoning_tokens=draw(COUNTS),
        images=draw(st.integers(0, 10_000)),
        compute_us=draw(st.integers(0, compute_us)),
    )


def reckoned(of: Price, usage: TokenUsage, markup_bp: int = 0) -> Fraction:
    """Nano-USD by the words of the price, in fractions."""

    def per_token(rate: Decimal | None, otherwise: Decimal) -> Fraction:
        return Fraction(otherwise if rate is None else rate) * 1000

    cached = min(usage.cached_tokens, usage.prompt_tokens)
    written = min(usage.cache_write_tokens, usage.prompt_tokens - cached)
    reasoning = min(usage.reasoning_tokens, usage.completion_tokens)
    total = (usage.prompt_tokens - cached - written) * per_token(of.input_usd_per_mtok, Decimal(0))
    total += cached * per_token(of.cached_input_usd_per_mtok, of.input_usd_per_mtok)
    total += written * per_token(of.cache_write_usd_per_mtok, of.input_usd_per_mtok)
    total += (usage.completion_tokens - reasoning) * per_token(of.output_usd_per_mtok, Decimal(0))
    total += reasoning * per_token(of.reasoning_usd_per_mtok, of.output_usd_per_mtok)
    total += 10**9 * (Fraction(of.usd_per_request or 0) + usage.images * Fraction(of.usd_per_image or 0))
    total += 10**9 * Fraction(of.compute_usd_per_hour or 0) * usage.compute_us / (3600 * 10**6)
    return total * (10_000 + markup_bp) / 10_000


def half_even(value: Fraction) -> int:
    with localcontext(prec=100):
        whole, rest = divmod(value, 1)
        half = Decimal("0.5") if rest == Fraction(1, 2) else Decimal(round(float(rest > Fraction(1, 2))))
        return int((Decimal(int(whole)) + half).to_integral_value(ROUND_HALF_EVEN))


def test_the_price_of_the_readme() -> None:
    # 9 prompt tokens at 0.10 and 3 completion tokens at 0.40 USD per million.
    assert price("0.10", "0.40").amount(TokenUsage(9, 3)) == 900 + 1200


def test_every_kind_has_its_price() -> None:
    dear = price(
        "1",
        "2",
        cached_input_usd_per_mtok=Decimal("0.1"),
        cache_write_usd_per_mtok=Decimal("1.25"),
        reasoning_usd_per_mtok=Decimal(4),
        usd_per_request=Decimal("0.001"),
        usd_per_image=Decimal("0.02"),
        compute_usd_per_hour=Decimal("3.6"),
        compute_ceiling_s=10.0,
    )
    usage = TokenUsage(100, 50, 60, cache_write_tokens=30, reasoning_tokens=20, images=3, compute_us=1_000_001)
    parts = [10 * 1000, 60 * 100, 30 * 1250, 30 * 2000, 20 * 4000, 1_000_000, 3 * 20_000_000, 1_000_001]
    assert dear.amount(usage) == sum(parts)
    # All of the prompt may be written to a cache, all of the output be reasoning, the compute reach its ceiling.
    assert dear.bound(100, 50, 3) == 100 * 1250 + 50 * 4000 + 1_000_000 + 60_000_000 + 10_000_000


@given(prices(), usages())
def test_an_amount_is_rounded_once_half_to_even(of: Price, usage: TokenUsage) -> None:
    assert of.amount(usage) == half_even(reckoned(of, usage))


@pytest.mark.parametrize(("tokens", "amount"), [(1, 0), (2, 1), (3, 2), (5, 2), (7, 4)])
def test_halves_go_to_the_even_side(tokens: int, amount: int) -> None:
    assert price("0.0005").amount(TokenUsage(tokens)) == amount


@given(prices(), usages(), MARKUPS)
def test_a_markup_raises_the_list_price_only_and_is_rounded_with_it(of: Price, usage: TokenUsage, bp: int) -> None:
    tariff = Tariff(of, of, bp)
    assert tariff.applied_markup_bp == (bp if of.tenant_id is None else 0)
    assert tariff.charged(usage) == half_even(reckoned(of, usage, tariff.applied_markup_bp))
    assert tariff.cost_of(usage) == of.amount(usage)


@given(st.data(), prices(), MARKUPS)
def test_the_bound_is_never_below_the_amount(data: st.DataObject, of: Price, bp: int) -> None:
    ceiling_us = round((of.compute_ceiling_s or 0) * 10**6)
    usage = data.draw(usages(compute_us=ceiling_us))
    more = data.draw(st.integers(0, 3))
    bounds = (usage.prompt_tokens + more, usage.completion_tokens + more, usage.images + more)
    assert 0 <= of.amount(usage) <= of.bound(*bounds)
    tariff = Tariff(of, None, bp)
    assert 0 <= tariff.charged(usage) <= tariff.bound(*bounds)


@given(MTOK, MTOK, COUNTS, COUNTS)
def test_the_bound_of_plain_tokens_is_no_more_than_needed(
    input_: Decimal, output: Decimal, prompt: int, completion: int
) -> None:
    plain = price(input_, output)
    assert 0 <= plain.bound(prompt, completion) - plain.amount(TokenUsage(prompt, completion)) <= 1


def test_unpriced_is_charged_nothing_and_says_so() -> None:
    usage = TokenUsage(5, 5)
    unpriced = Tariff(None, None, 500)
    assert (unpriced.charged(usage), unpriced.cost_of(usage), unpriced.bound(10**9, 10**9)) == (0, 0, 0)
    assert (unpriced.price_id, unpriced.cost_price_id, unpriced.applied_markup_bp) == (None, None, 0)
    cost_only = Tariff(None, price("1"), 500)
    assert (cost_only.charged(usage), cost_only.cost_of(usage)) == (0, 5000)
    assert (cost_only.price_id, cost_only.cost_price_id) == (None, UUID(int=1))


def test_a_cost_by_the_same_price_names_no_other() -> None:
    listed = price("1")
    assert Tariff(listed, listed).cost_price_id is None


def test_a_rate_too_fine_to_be_exact_is_refused() -> None:
    with pytest.raises(ValueError, match="decimal places"):
        price("0.0000000001")
