from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.export import cell, csv_of
from gateway.billing.report_query import STATUSES
from gateway.billing.report_rows import COUNTS, AdminUsageRow, made


def row(**named: str | None) -> AdminUsageRow:
    return made(dict.fromkeys(STATUSES, 1), dict.fromkeys(COUNTS, 2), 10**9, 5, 7, named)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_what_a_spreadsheet_would_run_is_quoted(start: str) -> None:
    assert cell(f"{start}HYPERLINK(1)") == f"'{start}HYPERLINK(1)"
    assert cell(f"a{start}") == f"a{start}"
    assert cell(f"a;{start}HYPERLINK(1);b") == f"a;'{start}HYPERLINK(1);b"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_name_comes_back_from_the_file(name: str) -> None:
    told = csv_of([row(project=name, project_id="p")], ["project"], costs=False).decode()
    header, line = list(csv.reader(io.StringIO(told, newline="")))
    assert header[:2] == ["project", "project_id"]
    assert line[0] == cell(name)
    assert len(line) == len(header)


def test_lines_end_and_quotes_stand_as_the_standard_says() -> None:
    told = csv_of([row(tag='a,"b"\n'), row(tag=None)], ["tag"], costs=True).decode()
    header, rest = told.split("\r\n", 1)
    assert header.startswith("tag,requests,requests_ok,")
    assert header.endswith(
        "charged_nano_usd,charged_usd,cost_nano_usd,cost_usd,saved_nano_usd,saved_usd,cache_hit_rate"
    )
    assert rest.startswith('"a,""b""\n",6,1,')
    assert "\r\n,6,1," in rest
    assert told.endswith("1000000000,1.000000000,5,0.000000005,7,0.000000007,0.5\r\n")
    assert "cost" not in csv_of([row(tag="x")], ["tag"], costs=False).decode()
