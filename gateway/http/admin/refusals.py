"""``/refusals``: how many requests were refused for a limit, whose and which. They have no row in the ledger."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.refusal_counts import RefusalCount, RefusalKey, refusal_counts
from gateway.http.admin.resource import After, Page, PageSize, bad_cursor, documented, page_of
from gateway.tenants.records import as_id

OfTenant = Annotated[str | None, QueryParameter(description="Only of this tenant; name or id.")]
Start = Annotated[
    datetime | None,
    QueryParameter(description="Counts of the quarters of an hour that begin from then on: 2027-01-01T00:00:00Z."),
]
End = Annotated[datetime | None, QueryParameter(description="Before this time.")]


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: UUID
    tenant: str | None
    key_id: str
    reason: str
    """What was limited: requests, tokens, concurrent or budget."""
    count: int


def refusal_handlers(engine: AsyncEngine) -> list[HTTPRouteHandler]:
    @get(
        "/refusals",
        operation_id="countRefusals",
        operation_class=documented(404),
        summary="Count refused requests by tenant, key and reason",
    )
    async def list_(
        tenant: OfTenant = None,
        start: Start = None,
        end: End = None,
        limit: PageSize = 100,
        after: After = None,
    ) -> Page[Refusals]:
        begin = None if after is None else _parse(after)
        found = await refusal_counts(engine, tenant=tenant, start=start, end=end, after=begin, limit=limit + 1)
        shown, following = page_of(found, limit, _cursor)
        return Page([Refusals(**asdict(count)) for count in shown], following)

    return [list_]


def _cursor(count: RefusalCount) -> str:
    return f"{count.tenant_id}~{count.key_id}~{count.reason}"


def _parse(cursor: str) -> RefusalKey:
    tenant, _, rest = cursor.partition("~")
    key, separator, reason = rest.partition("~")
    tenant_id = as_id(tenant)
    if tenant_id is None or not separator or not cursor.isprintable():
        raise bad_cursor()
    return tenant_id, key, reason
