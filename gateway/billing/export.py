"""Reports as CSV (RFC 4180), safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.billing.report_query import STATUSES, Dimension
from gateway.billing.report_rows import COUNTS, UsageRow, fields_of

MEDIA_TYPE = "text/csv; charset=utf-8; header=present"
_FORMULA_START = re.compile(r"(^|;)(?=[=+\-@\t\r\n])")
"""Also behind a semicolon: where the comma stands in numbers, spreadsheets take that for the end of a cell."""
_SAVED = ("saved_nano_usd", "saved_usd", "cache_hit_rate")
_AMOUNTS = ("charged_nano_usd", "charged_usd", "cost_nano_usd", "cost_usd")


def csv_of(rows: Iterable[UsageRow], group_by: Sequence[Dimension], *, costs: bool) -> bytes:
    """A header and a line for each row; CRLF ends lines. ``costs``: with what it cost us, which only rows for
    administrators hold."""
    dimensions = [field for dimension in group_by for field in fields_of(dimension)]
    amounts = (*(_AMOUNTS if costs else _AMOUNTS[:2]), *_SAVED)
    statuses = [f"requests_{status}" for status in STATUSES]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*dimensions, "requests", *statuses, *COUNTS, *amounts])
    for row in rows:
        writer.writerow(
            [
                *(cell(getattr(row, name)) for name in dimensions),
                row.requests,
                *(row.requests_by_status[status] for status in STATUSES),
                *(getattr(row, name) for name in COUNTS),
                *(getattr(row, name) for name in amounts),
            ]
        )
    return out.getvalue().encode()


def cell(value: Any) -> str:
    """A text that no spreadsheet takes for a formula: what begins like one gets an apostrophe in front."""
    text = "" if value is None else value.isoformat() if hasattr(value, "isoformat") else str(value)
    return _FORMULA_START.sub(r"\1'", text)
