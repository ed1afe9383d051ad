from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from gateway.billing.usage import parse_usd, usd_text
from gateway.tenants.limit_amount import limit_amount, required_amount
from gateway.tenants.principal import Metric
from gateway.tenants.records import InvalidField
from gateway.tenants.specs import MAX_AMOUNT


@given(st.integers(0, MAX_AMOUNT))
def test_usd_come_back_to_the_last_digit(nano_usd: int) -> None:
    text = usd_text(nano_usd)
    assert parse_usd(text) == nano_usd
    assert required_amount("budget", UNSET, text) == nano_usd
    assert parse_usd(text.rstrip("0").rstrip(".")) == nano_usd


@given(st.text(max_size=20))
def test_what_is_no_amount_is_refused(text: str) -> None:
    try:
        nano_usd = parse_usd(text)
    except ValueError:
        return
    whole, _, fraction = text.partition(".")
    assert text.isascii()
    assert (whole + fraction).isdigit()
    assert usd_text(nano_usd).startswith(str(int(whole)))


@pytest.mark.parametrize(
    "text", ["", ".5", "5.", "1e3", "-1", "+1", "1,5", "1_0", " 1", "1\n", "٣", "nan", "0.0000000001"]
)
def test_only_plain_decimals_are_usd(text: str) -> None:
    with pytest.raises(ValueError, match=r"12\.50"):
        parse_usd(text)


@pytest.mark.parametrize(
    ("metric", "amount", "amount_usd", "field"),
    [
        ("budget", 5, UNSET, "amount"),
        ("budget", UNSET, UNSET, "amount_usd"),
        ("budget", UNSET, "9007200", "amount_usd"),
        ("tokens", UNSET, "5", "amount_usd"),
        ("tokens", UNSET, UNSET, "amount"),
    ],
)
def test_each_metric_has_its_own_amount(
    metric: Metric, amount: int | UnsetType, amount_usd: str | UnsetType, field: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        required_amount(metric, amount, amount_usd)
    assert caught.value.field == field


def test_zero_is_an_amount_and_none_may_be_left_out() -> None:
    assert required_amount("concurrent", 0, UNSET) == 0
    assert required_amount("budget", UNSET, "0") == 0
    assert limit_amount("budget", UNSET, UNSET) is UNSET
