from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.values import LimitType, MomentType, UsdType, echo_table, resolve


@given(st.one_of(st.text(max_size=30), st.integers().map(str), st.decimals().map(str), st.datetimes().map(str)))
def test_any_text_is_a_value_or_a_clear_error(text: str) -> None:
    for kind in (LimitType(), UsdType(), MomentType()):
        try:
            value = kind.convert(text, None, None)
        except click.BadParameter as fault:
            assert fault.message
        else:
            if isinstance(value, int):
                assert value >= 0
            elif isinstance(value, datetime):
                assert value.tzinfo is not None


@given(st.decimals("0", "999999999", places=9))
def test_usd_is_read_to_the_last_nano(amount: Decimal) -> None:
    assert UsdType().convert(f"{amount:f}", None, None) == int(amount * 10**9)


def test_a_date_is_its_midnight_in_the_zone() -> None:
    moment = MomentType().convert("2026-06-01", None, None)
    assert resolve(moment, ZoneInfo("Europe/Berlin")) == datetime(2026, 5, 31, 22, tzinfo=UTC)
    assert resolve(MomentType().convert("2026-06-01T00:00:00Z", None, None), ZoneInfo("Europe/Berlin")) == (
        datetime(2026, 6, 1, tzinfo=UTC)
    )


def test_a_table_obeys_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    echo_table(("NAME", "COUNT"), [("a\x1b[31m\n", 1), ("long name", 200)], numbers=("COUNT",))
    assert capsys.readouterr().out == "NAME       COUNT\na?[31m?        1\nlong name    200\n"
