"""``GET /v1/usage`` and ``GET /v1/usage/{request_id}``: a tenant's own requests, for its keys that may read usage."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import Annotated, Final, Literal
from uuid import UUID
from weakref import WeakValueDictionary

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.report_query import HIDDEN_FROM_TENANTS, InvalidReport, UsageQuery
from gateway.billing.reports import HashEndUser, usage_report
from gateway.billing.request_row import RequestUsage, own_request
from gateway.billing.usage import Status
from gateway.http.operations import TENANT_ERRORS, operation
from gateway.http.tenant_gate import authorized
from gateway.http.usage_answer import (
    DEFAULT_LIMIT,
    AnyRequest,
    Cursor,
    End,
    EndUsers,
    FormatParameter,
    Hours,
    Keys,
    Limit,
    Models,
    Months,
    OrderBy,
    Projects,
    Start,
    Tags,
    Timezone,
    UsageReport,
    answer,
    check_parameters,
    format_of,
)
from gateway.tenants.principal import Principal
from gateway.tenants.service import Tenants
from worker.protocol.errors import ApiError

OwnDimension = Literal["project", "key", "model", "end_user", "tag", "status", "hour", "day", "month"]
GroupBy = Annotated[
    list[OwnDimension] | None, QueryParameter(description="What to sum apart, and sort by; may be given several times.")
]
Statuses = Annotated[list[Status] | None, QueryParameter(description="Only with these statuses.")]
Days = Annotated[list[date] | None, QueryParameter(description="Only on these days.")]
_PARAMETERS: Final = tuple(
    name for name in (*UsageQuery.__struct_fields__, "format") if name not in HIDDEN_FROM_TENANTS
)


def tenant_usage_handlers(
    tenants: Tenants, engine: AsyncEngine, hash_end_user: HashEndUser | None = None
) -> list[HTTPRouteHandler]:
    turns: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()

    @get(
        "/v1/usage",
        operation_id="reportOwnUsage",
        operation_class=operation(TENANT_ERRORS, media_types=("text/csv",)),
        summary="Report the usage of this key's tenant",
        tags=["Usage"],
    )
    async def report(
        request: AnyRequest,
        start: Start = None,
        end: End = None,
        timezone: Timezone = None,
        group_by: GroupBy = None,
        project: Projects = None,
        key: Keys = None,
        model: Models = None,
        end_user: EndUsers = None,
        tag: Tags = None,
        status: Statuses = None,
        hour: Hours = None,
        day: Days = None,
        month: Months = None,
        order_by: OrderBy = None,
        limit: Limit = None,
        cursor: Cursor = None,
        format: FormatParameter = None,
    ) -> Response[UsageReport]:
        caller = await _reader(tenants, request)
        check_parameters(request, _PARAMETERS)
        if order_by is not None and order_by.removeprefix("-") in HIDDEN_FROM_TENANTS:
            raise InvalidReport("order_by", "order_by takes a measure that the report shows, or what group_by names")
        query = UsageQuery(
            start=start,
            end=end,
            timezone=caller.timezone if timezone is None else timezone,
            group_by=group_by or (),
            project=project or (),
            key=key or (),
            model=model or (),
            end_user=end_user or (),
            tag=tag or (),
            status=status or (),
            hour=hour or (),
            day=day or (),
            month=month or (),
            order_by=order_by,
            limit=limit or DEFAULT_LIMIT,
            cursor=cursor,
        )
        # One at a time of each tenant: connections and threads for reports are few, and everybody's.
        async with turns.setdefault(caller.tenant_id, asyncio.Lock()):
            found = await usage_report(engine, query, own=caller.tenant_id, hash_end_user=hash_end_user)
            return await answer(request, query, found, format_of(request, format), for_admin=False)

    @get(
        "/v1/usage/{request_id:str}",
        operation_id="retrieveRequestUsage",
        operation_class=operation(TENANT_ERRORS),
        summary="Show what one request came to",
        tags=["Usage"],
    )
    async def one(request: AnyRequest, request_id: FromPath[str]) -> RequestUsage:
        caller = await _reader(tenants, request)
        named = _id(request_id)
        found = None if named is None else await own_request(engine, caller.tenant_id, named)
        if found is None:
            raise ApiError(
                404,
                f"There is no request {request_id[:100]!r} of yours in the ledger. Its id is the `x-request-id` of the "
                "answer; its row is written some seconds after the end.",
                param="request_id",
                code="not_found",
            )
        return found

    return [report, one]


def _id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


async def _reader(tenants: Tenants, request: AnyRequest) -> Principal:
    """The caller, who may read usage. Raises ApiError (401, 403), DatabaseUnavailable."""
    return await authorized(tenants, request, ("usage:read",), "read usage")
