from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.usage import usd_text


@given(st.integers(-(10**30), 10**30))
def test_usd_is_exact_and_reads_back(nano: int) -> None:
    text = usd_text(nano)
    sign = -1 if text.startswith("-") else 1
    whole, fraction = text.lstrip("-").split(".")
    assert len(fraction) == 9
    assert sign * (int(whole) * 10**9 + int(fraction)) == nano
