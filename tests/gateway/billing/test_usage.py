from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.usage import Price, TokenUsage, usd_text

RATES = st.decimals("0", "10000", places=9)
TOKENS = st.integers(0, 10**9)


def _price(input_: Decimal | str, output: Decimal | str) -> Price:
    return Price(UUID(int=1), "m", Decimal(input_), Decimal(output), datetime(2026, 1, 1, tzinfo=UTC))


def test_the_price_of_the_readme() -> None:
    # 9 prompt tokens at 0.10 and 3 completion tokens at 0.40 USD per million.
    assert _price("0.10", "0.40").amount(TokenUsage(9, 3)) == 900 + 1200


@given(RATES, RATES, TOKENS, TOKENS)
def test_the_bound_is_never_below_the_amount(input_: Decimal, output: Decimal, prompt: int, completion: int) -> None:
    price = _price(input_, output)
    amount, bound = price.amount(TokenUsage(prompt, completion)), price.bound(prompt, completion)
    assert 0 <= bound - amount <= 1


@given(RATES, RATES, TOKENS, TOKENS)
def test_an_amount_is_exact_to_half_a_nano_usd(input_: Decimal, output: Decimal, prompt: int, completion: int) -> None:
    exact = 1000 * (prompt * int(input_ * 10**9) + completion * int(output * 10**9))  # in 1e-18 USD
    assert abs(_price(input_, output).amount(TokenUsage(prompt, completion)) * 10**9 - exact) * 2 <= 10**9


@given(st.integers(-(10**30), 10**30))
def test_usd_is_exact_and_reads_back(nano: int) -> None:
    text = usd_text(nano)
    sign = -1 if text.startswith("-") else 1
    whole, fraction = text.lstrip("-").split(".")
    assert len(fraction) == 9
    assert sign * (int(whole) * 10**9 + int(fraction)) == nano
