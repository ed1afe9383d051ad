"""What both usage doors share: the format of the answer, and the link to the next page."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response
from litestar.params import QueryParameter

from gateway.billing.export import MEDIA_TYPE, csv_of
from gateway.billing.report_query import MAX_LIMIT, Dimension, InvalidReport, UsageQuery
from gateway.billing.report_rows import AdminUsageRow, UsageRow, for_tenant
from gateway.billing.report_statement import Report

DEFAULT_LIMIT = 1000
AnyRequest = Request[Any, Any, Any]
Format = Literal["json", "csv"]
"""What ``format`` takes; without it, the `accept` header decides."""


class UsageReport(msgspec.Struct, frozen=True):
    """``data``: one row for each combination of what was grouped by; one row for all, without ``group_by``."""

    start: datetime | None
    end: datetime | None
    timezone: str
    data: list[UsageRow]
    next_cursor: str | None
    """Give it as ``cursor``, with the same query, to get the rows after these. Null: there are none."""


class AdminUsageReport(msgspec.Struct, frozen=True):
    """``data``: one row for each combination of what was grouped by; one row for all, without ``group_by``."""

    start: datetime | None
    end: datetime | None
    timezone: str
    data: list[AdminUsageRow]
    next_cursor: str | None
    """Give it as ``cursor``, with the same query, to get the rows after these. Null: there are none."""


Start = Annotated[
    datetime | None, QueryParameter(description="From this time on, with its zone: 2027-01-01T00:00:00Z.")
]
End = Annotated[datetime | None, QueryParameter(description="Before this time.")]
Timezone = Annotated[
    str | None, QueryParameter(description="IANA name of the zone whose hours, days and months are meant.")
]
Projects = Annotated[list[str] | None, QueryParameter(description="Only of these projects, by name or id.")]
Keys = Annotated[list[str] | None, QueryParameter(description="Only by these keys, by public id.")]
Models = Annotated[list[str] | None, QueryParameter(description="Only for these models.")]
EndUsers = Annotated[
    list[str] | None, QueryParameter(description="Only of these end users: their ids, or the hashes that reports show.")
]
Tags = Annotated[list[str] | None, QueryParameter(description="Only with at least one of these tags.")]
Hours = Annotated[list[datetime] | None, QueryParameter(description="Only in these hours: any moment in each.")]
Months = Annotated[list[str] | None, QueryParameter(description="Only in these months, as 2026-11.")]
OrderBy = Annotated[
    str | None,
    QueryParameter(
        description="A measure (`requests`, `prompt_tokens`, `completion_tokens`, `cached_tokens`, "
        "`cache_write_tokens`, `reasoning_tokens`, `images`, `compute_us`, `charged`, for administrators `cost`) or "
        "what `group_by` names; `-` in front for the largest first, as in `-charged`."
    ),
]
Limit = Annotated[int | None, QueryParameter(ge=1, le=MAX_LIMIT, description="Most rows of one answer. [1000]")]
Cursor = Annotated[str | None, QueryParameter(description="`next_cursor` of the answer before.")]
FormatParameter = Annotated[
    Format | None, QueryParameter(description="`json` or `csv`; without it, the `accept` header decides.")
]


def check_parameters(request: AnyRequest, known: Collection[str]) -> None:
    """Raises InvalidReport for a parameter that would do nothing: a misspelt filter must not report everything."""
    for name in request.query_params:
        if name not in known:
            raise InvalidReport(name[:100], f"there is no parameter {name[:100]!r} here; there are {', '.join(known)}")


def format_of(request: AnyRequest, given: Format | None) -> Format:
    if given is not None:
        return given
    return "csv" if request.accept.best_match(["application/json", "text/csv"]) == "text/csv" else "json"


async def answer(
    request: AnyRequest, query: UsageQuery, report: Report, format: Format, *, for_admin: bool
) -> Response[Any]:
    """Written in a thread: a long one takes a while, and requests are served beside it."""
    headers = {"vary": "accept"}
    if report.next_cursor is not None:
        headers["link"] = f'<{_next(request, report.next_cursor)}>; rel="next"'
    if format == "csv":
        headers["content-disposition"] = 'attachment; filename="usage.csv"'
    body = await asyncio.to_thread(_written, query, report, format, for_admin=for_admin)
    return Response(body, media_type=MEDIA_TYPE if format == "csv" else "application/json", headers=headers)


def _written(query: UsageQuery, report: Report, format: Format, *, for_admin: bool) -> bytes:
    rows: Sequence[UsageRow] = report.rows if for_admin else [for_tenant(row) for row in report.rows]
    if format == "csv":
        wanted: list[Dimension] = list(dict.fromkeys(query.group_by))
        return csv_of(rows, wanted, costs=for_admin)
    kind: Any = AdminUsageReport if for_admin else UsageReport
    return msgspec.json.encode(kind(query.start, query.end, query.timezone, rows, report.next_cursor))


def _next(request: AnyRequest, cursor: str) -> str:
    parameters = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    return f"{request.url.path}?{urlencode([*parameters, ('cursor', cursor)])}"
