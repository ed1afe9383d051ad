"""``/cache``: kept answers purged, and how often the semantic tier was right."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta

from gateway.administration.caches import MOST_DAYS, CacheAdministration
from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import Body, documented
from gateway.tenants.plain_text import MOST, check_plain

Tenant = Annotated[str, QueryParameter(min_length=1, description="Whose: a tenant's name or id.")]
Days = Annotated[int, QueryParameter(ge=1, le=MOST_DAYS, description="Of so many days, today (UTC) among them.")]
Value = Annotated[str, Meta(min_length=1, max_length=MOST)]


class Purge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has all that is named; everything of the tenant's, if nothing is."""

    tenant: Annotated[str, Meta(min_length=1, max_length=100)]
    """Name or id."""
    model: Value | None = None
    """The route, as clients name it."""
    version: Value | None = None
    """Of the route and the models behind it, as it was when the answer was made."""
    tag: Value | None = None
    """One that the request bore."""


class Purged(msgspec.Struct, frozen=True):
    purged: int
    """Answers that are forgotten."""


class AgreementReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of the would-be hits of the semantic tier that were asked of the model all the same."""

    days: int
    agreed: int
    disagreed: int
    false_hit_rate: float | None
    """Null: none was asked."""


def cache_handlers(caches: CacheAdministration) -> list[HTTPRouteHandler]:
    @post(
        "/cache/purge",
        role="admin",
        status_code=200,
        dto=Body[Purge],
        return_dto=None,
        operation_id="purgeCache",
        operation_class=documented(403, 404, example={"tenant": "demo", "model": "small"}),
        summary="Forget a tenant's kept answers",
    )
    async def purge(request: AnyRequest, data: JSONBody[Purge]) -> Purged:
        for name in ("model", "version", "tag"):
            check_plain(name, getattr(data, name))
        count = await caches.purge(actor_of(request), data.tenant, model=data.model, version=data.version, tag=data.tag)
        return Purged(count)

    @get(
        "/cache/agreement",
        operation_id="reportCacheAgreement",
        operation_class=documented(404),
        summary="Tell how often the model agreed with what the semantic cache had for it",
    )
    async def agreement(tenant: Tenant, days: Days = 30) -> AgreementReport:
        found = await caches.agreement(tenant, days=days)
        asked = found.agreed + found.disagreed
        return AgreementReport(
            days=days,
            agreed=found.agreed,
            disagreed=found.disagreed,
            false_hit_rate=round(found.disagreed / asked, 6) if asked else None,
        )

    return [purge, agreement]
