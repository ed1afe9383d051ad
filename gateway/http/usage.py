"""``GET /admin/v1/usage``: what tenants used and what it cost, for administrators."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.report_query import Dimension, UsageQuery
from gateway.billing.reports import HashEndUser, usage_report
from gateway.billing.usage import Status
from gateway.http.admin.auth import require_admin
from gateway.http.operations import ADMIN_ERRORS, operation
from gateway.http.usage_answer import (
    DEFAULT_LIMIT,
    AdminUsageReport,
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
    answer,
    check_parameters,
    format_of,
)
from gateway.tenants.service import Tenants

GroupBy = Annotated[
    list[Dimension] | None, QueryParameter(description="What to sum apart, and sort by; may be given several times.")
]
TenantNames = Annotated[list[str] | None, QueryParameter(description="Only these tenants, by name or id.")]
Backends = Annotated[list[str] | None, QueryParameter(description="Only served by these backends; empty: by none.")]
Statuses = Annotated[list[Status] | None, QueryParameter(description="Only with these statuses.")]
Days = Annotated[list[date] | None, QueryParameter(description="Only on these days.")]
_PARAMETERS: Final = (*UsageQuery.__struct_fields__, "format")


def usage_handlers(
    tenants: Tenants, engine: AsyncEngine, hash_end_user: HashEndUser | None = None
) -> list[HTTPRouteHandler]:
    @get(
        "/admin/v1/usage",
        operation_id="reportUsage",
        operation_class=operation(ADMIN_ERRORS, media_types=("text/csv",)),
        summary="Report usage and cost",
        security=[{"admin_key": []}],
        tags=["Administration"],
    )
    async def report(
        request: AnyRequest,
        start: Start = None,
        end: End = None,
        timezone: Timezone = None,
        group_by: GroupBy = None,
        tenant: TenantNames = None,
        project: Projects = None,
        key: Keys = None,
        model: Models = None,
        backend: Backends = None,
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
    ) -> Response[AdminUsageReport]:
        await require_admin(tenants, request)
        check_parameters(request, _PARAMETERS)
        query = UsageQuery(
            start=start,
            end=end,
            timezone="UTC" if timezone is None else timezone,
            group_by=group_by or (),
            tenant=tenant or (),
            project=project or (),
            key=key or (),
            model=model or (),
            backend=backend or (),
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
        found = await usage_report(engine, query, hash_end_user=hash_end_user)
        return await answer(request, query, found, format_of(request, format), for_admin=True)

    return [report]
