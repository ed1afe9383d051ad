from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.report_query import (
    DIMENSIONS,
    InvalidReport,
    UsageQuery,
    decode_cursor,
    encode_cursor,
    parse_month,
)

NOON = datetime(2026, 6, 3, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"start": NOON, "end": NOON}, "end"),
        ({"start": NOON, "end": NOON - timedelta(days=1)}, "end"),
        ({"start": NOON.replace(tzinfo=None)}, "start"),
        ({"end": NOON.replace(tzinfo=None)}, "end"),
        *(({"timezone": zone}, "timezone") for zone in ("", "Mars/Olympus", "../etc/passwd", "\x00", "x" * 300)),
        ({"group_by": ["shoe size"]}, "group_by"),
        ({"status": ["fine"]}, "status"),
        ({"model": ["m"] * 101}, "model"),
        ({"tag": ["\x00"]}, "tag"),
        ({"key": ["\ud800"]}, "key"),
        ({"month": ["June"]}, "month"),
        ({"hour": [NOON.replace(tzinfo=None)]}, "hour"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"order_by": "--charged"}, "order_by"),
        ({"order_by": "model"}, "order_by"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_named(query: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidReport) as caught:
        UsageQuery(**query).checked()
    assert caught.value.parameter == parameter
    assert len(str(caught.value)) < 400


def test_months_are_written_in_one_way() -> None:
    assert parse_month("2026-11") == date(2026, 11, 1)
    for text in ("2026-1", "2026-13", "202611", "2026-11-01", "２０２６-11", "1969-12", "2200-01", ""):
        with pytest.raises(InvalidReport):
            parse_month(text)


def test_filters_of_time_leave_what_all_of_them_allow() -> None:
    query = UsageQuery(
        month=["2026-06"], day=[NOON.date(), date(2026, 7, 1)], hour=[NOON, NOON + timedelta(minutes=59)]
    )
    assert query.checked().ranges == [(NOON, NOON + timedelta(hours=1))]
    assert UsageQuery(month=["2026-05"], day=[NOON.date()]).checked().ranges == []


def test_rollups_answer_all_but_end_users_and_tags() -> None:
    for dimension in DIMENSIONS:
        rows = dimension in ("end_user", "tag")
        assert UsageQuery(group_by=[dimension]).checked().from_rows == rows
    assert UsageQuery(tag=["x"]).checked().from_rows
    assert UsageQuery(end_user=["x"]).checked().from_rows


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.integers(0, 2**63)))
def test_a_cursor_brings_back_the_position(position: list[str | int]) -> None:
    cursor = encode_cursor("f", position)
    kinds = [type(value) for value in position]
    assert decode_cursor(cursor, "f", kinds) == position
    assert cursor.isascii()
    with pytest.raises(InvalidReport, match="another query"):
        decode_cursor(cursor, "g", kinds)
    with pytest.raises(InvalidReport):
        decode_cursor(cursor, "f", [*kinds, str])
    if position:
        with pytest.raises(InvalidReport):
            decode_cursor(cursor, "f", [str if kind is int else int for kind in kinds])


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda raw: encode_cursor("f", [raw.hex()])[:-1]))
def test_nothing_else_is_a_cursor(text: str) -> None:
    with pytest.raises(InvalidReport):
        decode_cursor(text, "f", [int])


def test_cursors_tell_queries_apart() -> None:
    queries = [
        UsageQuery(),
        UsageQuery(model=["m"]),
        UsageQuery(project=["m"]),
        UsageQuery(group_by=["model", "key"]),
        UsageQuery(group_by=["key", "model"]),
        UsageQuery(order_by="charged"),
        UsageQuery(order_by="-charged"),
        UsageQuery(start=NOON),
        UsageQuery(end=NOON),
        UsageQuery(timezone="Europe/Berlin"),
    ]
    prints = {query.checked().fingerprint(viewer) for query in queries for viewer in ("None", "t1")}
    assert len(prints) == 2 * len(queries)
    same = msgspec.structs.replace(UsageQuery(model=["a", "b"]), limit=5, cursor="x")
    assert same.checked().fingerprint("t") == UsageQuery(model=["b", "a"]).checked().fingerprint("t")
