"""``GET /admin/v1/invoices/{tenant}/{month}`` and ``GET /admin/v1/forecast/{tenant}``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter, QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.forecast import Forecast, forecast
from gateway.billing.invoice_page import invoice_page
from gateway.billing.invoices import Invoice, invoice
from gateway.clock import Clock
from gateway.http.admin.auth import require_admin
from gateway.http.errors import Problem
from gateway.http.operations import ADMIN_ERRORS, operation
from gateway.http.usage_answer import AnyRequest, check_parameters
from gateway.tenants.records import UnknownTenant
from gateway.tenants.service import Tenants

TenantRef = Annotated[str, PathParameter(description="Name or id of a tenant; a name with a slash: the id.")]
Month = Annotated[str, PathParameter(description="Month in the tenant's time zone: 2026-11.")]
FormatParameter = Annotated[
    Literal["json", "html"] | None,
    QueryParameter(description="`json`, or `html` for a page to print; without it, the `accept` header decides."),
]
# The page brings its style along; nothing else may be loaded or run.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "private, no-store",
    "vary": "accept",
}


def invoice_handlers(tenants: Tenants, engine: AsyncEngine, clock: Clock) -> list[HTTPRouteHandler]:
    @get(
        "/admin/v1/invoices/{tenant:str}/{month:str}",
        operation_id="makeInvoice",
        operation_class=operation(ADMIN_ERRORS, media_types=("text/html",)),
        summary="Make a tenant's invoice for a month",
        security=[{"admin_key": []}],
        tags=["Administration"],
    )
    async def make_invoice(
        request: AnyRequest, tenant: TenantRef, month: Month, format: FormatParameter = None
    ) -> Response[Invoice]:
        await require_admin(tenants, request)
        check_parameters(request, ("format",))
        try:
            made = await invoice(engine, tenant, month, clock.now())
        except UnknownTenant as fault:
            raise Problem(404, str(fault)) from None
        wanted = request.accept.best_match(["application/json", "text/html"]) if format is None else f"text/{format}"
        answer: Response[Any]
        if wanted == "text/html":
            answer = Response(invoice_page(made), media_type="text/html", headers=_PAGE_HEADERS)
        else:
            answer = Response(msgspec.json.encode(made), media_type="application/json", headers={"vary": "accept"})
        return answer

    @get(
        "/admin/v1/forecast/{tenant:str}",
        operation_id="forecastCharges",
        operation_class=operation(ADMIN_ERRORS),
        summary="Forecast a tenant's charges to the end of the month",
        security=[{"admin_key": []}],
        tags=["Administration"],
    )
    async def forecast_charges(request: AnyRequest, tenant: TenantRef) -> Forecast:
        await require_admin(tenants, request)
        check_parameters(request, ())
        try:
            return await forecast(engine, tenant, clock.now())
        except UnknownTenant as fault:
            raise Problem(404, str(fault)) from None

    return [make_invoice, forecast_charges]
