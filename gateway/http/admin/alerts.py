"""``/alerts``: thresholds of budgets that were crossed, and whether the tenant's webhook took the news."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter, QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.alert_log import AlertRecord, UnknownAlert, find_alert, list_alerts
from gateway.billing.usage import usd_text
from gateway.http.admin.resource import After, Page, PageSize, bad_cursor, documented, page_of, single
from gateway.tenants.records import as_id

OfTenant = Annotated[str | None, QueryParameter(description="Only of this tenant; name or id.")]
AlertRef = Annotated[str, PathParameter(description="Id of the alert.")]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    tenant_id: UUID
    limit_id: UUID
    subject: str
    target: str
    window: str
    """Of the limit, as it was then."""
    period_start: datetime
    threshold: int
    """Percent of the amount."""
    spent_nano_usd: int
    spent_usd: str
    amount_nano_usd: int
    amount_usd: str
    crossed_at: datetime
    attempts: int
    next_attempt_at: datetime | None
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_error: str | None


def alert_handlers(engine: AsyncEngine) -> list[HTTPRouteHandler]:
    @get(
        "/alerts",
        operation_id="listAlerts",
        operation_class=documented(404),
        summary="List crossed thresholds, the newest first",
    )
    async def list_(tenant: OfTenant = None, limit: PageSize = 100, after: After = None) -> Page[Alert]:
        begin = None if after is None else as_id(after)
        if after is not None and begin is None:
            raise bad_cursor()
        found = await list_alerts(engine, tenant=tenant, after=begin, limit=limit + 1)
        shown, following = page_of(found, limit, lambda alert: str(alert.id))
        return Page([_shown(alert) for alert in shown], following)

    @get(
        "/alerts/{alert:str}",
        operation_id="retrieveAlert",
        operation_class=documented(404, tagged=True),
        summary="Show a crossed threshold",
    )
    async def retrieve(alert: AlertRef) -> Response[Alert]:
        id_ = as_id(alert)
        if id_ is None:
            raise UnknownAlert(alert)
        found = await find_alert(engine, id_)
        return single(_shown(found), found.attempts + 1)

    return [list_, retrieve]


def _shown(alert: AlertRecord) -> Alert:
    spent, amount = usd_text(alert.spent_nano_usd), usd_text(alert.amount_nano_usd)
    return Alert(**asdict(alert), spent_usd=spent, amount_usd=amount)
