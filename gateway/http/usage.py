"""``GET /admin/v1/usage``: what tenants used and what it cost, for administrators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.reports import Dimension, InvalidRange, UsageRow, usage_report
from gateway.http.client import bearer
from gateway.http.errors import Problem
from gateway.tenants.records import InvalidKey, UnknownTenant
from gateway.tenants.service import Tenants


class UsageReport(msgspec.Struct, frozen=True):
    """``data``: one row for each combination of what was grouped by; one row for all, without ``group_by``."""

    tenant: str | None
    start: datetime | None
    end: datetime | None
    data: list[UsageRow]


Tenant = Annotated[str | None, QueryParameter(description="Name of a tenant; all tenants, if left out.")]
Start = Annotated[
    datetime | None, QueryParameter(description="From this time on, with its zone: 2027-01-01T00:00:00Z.")
]
End = Annotated[datetime | None, QueryParameter(description="Before this time.")]
GroupBy = Annotated[
    list[Dimension] | None, QueryParameter(description="What to sum apart; may be given several times.")
]
Timezone = Annotated[str, QueryParameter(description="IANA name of the zone whose days `day` groups by.")]


def usage_handlers(tenants: Tenants, engine: AsyncEngine) -> list[HTTPRouteHandler]:
    @get("/admin/v1/usage", operation_id="reportUsage", summary="Report usage and cost", tags=["Administration"])
    async def report(
        request: Request[Any, Any, Any],
        tenant: Tenant = None,
        start: Start = None,
        end: End = None,
        group_by: GroupBy = None,
        timezone: Timezone = "UTC",
    ) -> UsageReport:
        await _check_admin(tenants, request)
        try:
            tenant_id = None if tenant is None else (await tenants.tenant(tenant)).id
            rows = await usage_report(
                engine, tenant=tenant_id, start=start, end=end, group_by=set(group_by or ()), timezone=timezone
            )
        except UnknownTenant as fault:
            raise Problem(404, str(fault)) from None
        except InvalidRange as fault:
            raise Problem(400, str(fault)) from None
        return UsageReport(tenant, start, end, rows)

    return [report]


async def _check_admin(tenants: Tenants, request: Request[Any, Any, Any]) -> None:
    try:
        await tenants.authenticate_admin(bearer(request.headers.get("authorization")))
    except InvalidKey:
        raise Problem(
            401, "Send an administrator's key as a bearer token.", headers={"www-authenticate": "Bearer"}
        ) from None
