"""``/prices``: what routes cost, tenants and us. A price never changes once it is set; it is followed, or it ends."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import Meta

from gateway.billing.price_spec import MAX_CEILING_S, MAX_SOURCE, RATES, Basis, PriceSpec, parse_rate
from gateway.billing.prices import Price, PriceBook, price_version
from gateway.billing.usage import USD_PATTERN
from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    Body,
    IfMatch,
    Name,
    Page,
    PageSize,
    documented,
    expected_version,
    page_behind,
    page_of,
    single,
)
from gateway.http.errors import Problem
from gateway.tenants.records import ConfigurationError, Unknown, as_id

PriceRef = Annotated[str, PathParameter(description="Id of the price.")]
OfRoute = Annotated[
    str,
    QueryParameter(
        description="Prices of this route.", examples=[Example(summary="A name", value="smollm2-135m-instruct")]
    ),
]
OfTenant = Annotated[str | None, QueryParameter(description="Only this tenant's own prices; name or id.")]
OfBasis = Annotated[Basis | None, QueryParameter(description="Only what tenants pay, or what it costs you.")]
Rate = Annotated[str, Meta(pattern=f"^{USD_PATTERN}$", description="USD, as `0.15`; never a number.")]
Moment = Annotated[datetime, Meta(tz=True)]
Source = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE, description="Where it comes from.")]
Ceiling = Annotated[
    float, Meta(gt=0, le=MAX_CEILING_S, description="Device seconds that one request reserves of the compute price.")
]


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are exact, in USD as text."""

    id: UUID
    route: str
    tenant_id: UUID | None
    """Null: the list price; else whose own price it is."""
    basis: Basis
    input_usd_per_mtok: str
    """Per million tokens, like the next ones."""
    output_usd_per_mtok: str
    cached_input_usd_per_mtok: str | None
    """Null: as input."""
    cache_write_usd_per_mtok: str | None
    """Null: as input."""
    reasoning_usd_per_mtok: str | None
    """Null: as output."""
    usd_per_request: str | None
    usd_per_image: str | None
    compute_usd_per_hour: str | None
    compute_ceiling_s: float | None
    source: str | None
    effective_from: datetime
    effective_until: datetime | None
    """Null: until the next version begins."""


class ImportedPriceView(PriceView, frozen=True, kw_only=True):
    notes: list[str]
    """What of the model's price ours cannot hold, and what was taken in its place."""


class NewPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    route: Name
    tenant: Name | None = None
    """Name or id of the tenant whose own price it is, which takes the place of the list price; null: the list price."""
    basis: Basis = "charge"
    """charge: what tenants pay; cost: what the backends cost you."""
    input_usd_per_mtok: Rate
    output_usd_per_mtok: Rate
    cached_input_usd_per_mtok: Rate | None = None
    cache_write_usd_per_mtok: Rate | None = None
    reasoning_usd_per_mtok: Rate | None = None
    usd_per_request: Rate | None = None
    usd_per_image: Rate | None = None
    compute_usd_per_hour: Rate | None = None
    compute_ceiling_s: Ceiling | None = None
    source: Source | None = None
    effective_from: Moment | None = None
    """Null: from now on."""


class ImportedPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    route: Name
    provider: Name
    """As genai-prices names it, such as openai or anthropic."""
    model: Name
    """As the provider names it, such as gpt-4o."""
    tenant: Name | None = None
    basis: Basis = "charge"
    effective_from: Moment | None = None
    """Null: from now on."""


class PricePatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effective_until: Moment
    """When it ends: now or later."""


_EXAMPLE = {"route": "smollm2-135m-instruct", "input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}
_IMPORT = {"route": "smollm2-135m-instruct", "provider": "openai", "model": "gpt-4o", "basis": "cost"}
_END = {"effective_until": "2100-01-01T00:00:00Z"}


def price_handlers(prices: PriceBook) -> list[HTTPRouteHandler]:
    @get(
        "/prices",
        operation_id="listPrices",
        operation_class=documented(404),
        summary="List every version of a route's prices: list prices first, then tenants' own, each oldest first",
    )
    async def list_(
        route: OfRoute, tenant: OfTenant = None, basis: OfBasis = None, limit: PageSize = 100, after: After = None
    ) -> Page[PriceView]:
        found = page_behind(await prices.prices(route, tenant=tenant, basis=basis), after, limit, _cursor)
        shown, following = page_of(found, limit, _cursor)
        return Page([_shown(price) for price in shown], following)

    @post(
        "/prices",
        role="admin",
        dto=Body[NewPrice],
        return_dto=None,
        operation_id="createPrice",
        operation_class=documented(403, 404, 409, example=_EXAMPLE, tagged=True, created=True),
        summary="Set a price; it takes the place of the one before from `effective_from` on",
    )
    async def create(request: AnyRequest, data: JSONBody[NewPrice]) -> Response[PriceView]:
        values: dict[str, Any] = msgspec.structs.asdict(data)
        for name in RATES:
            if values[name] is not None:
                values[name] = _rate(name, values[name])
        price = await prices.set_price(actor_of(request), PriceSpec(**values))
        return single(_shown(price), price_version(price), created_at=f"/prices/{price.id}")

    @post(
        "/prices/import",
        role="admin",
        dto=Body[ImportedPrice],
        return_dto=None,
        operation_id="importPrice",
        operation_class=documented(403, 404, 409, example=_IMPORT, tagged=True, created=True),
        summary="Give a route the price of a hosted model, as the genai-prices package knows it",
    )
    async def import_(request: AnyRequest, data: JSONBody[ImportedPrice]) -> Response[ImportedPriceView]:
        found = await prices.hosted_price(
            data.route,
            data.provider,
            data.model,
            tenant=data.tenant,
            basis=data.basis,
            effective_from=data.effective_from,
        )
        price = await prices.set_price(actor_of(request), found.spec)
        view = ImportedPriceView(**msgspec.structs.asdict(_shown(price)), notes=list(found.notes))
        return single(view, price_version(price), created_at=f"/prices/{price.id}")

    @get(
        "/prices/{price:str}",
        operation_id="retrievePrice",
        operation_class=documented(404, tagged=True),
        summary="Show a price",
    )
    async def retrieve(price: PriceRef) -> Response[PriceView]:
        found = await prices.stored_price(_id(price))
        return single(_shown(found), price_version(found))

    @patch(
        "/prices/{price:str}",
        role="admin",
        dto=Body[PricePatch],
        return_dto=None,
        operation_id="updatePrice",
        operation_class=documented(403, 404, 409, 412, example=_END, tagged=True),
        summary="Say when a price ends",
    )
    async def update(
        request: AnyRequest, price: PriceRef, data: JSONBody[PricePatch], if_match: IfMatch = None
    ) -> Response[PriceView]:
        ended = await prices.end_price(
            actor_of(request), _id(price), data.effective_until, if_version=expected_version(if_match)
        )
        return single(_shown(ended), price_version(ended))

    @delete(
        "/prices/{price:str}",
        role="admin",
        status_code=200,
        operation_id="endPrice",
        operation_class=documented(403, 404, 409, 412, tagged=True),
        summary="End a price now; what was charged by it stays so",
    )
    async def end(request: AnyRequest, price: PriceRef, if_match: IfMatch = None) -> Response[PriceView]:
        ended = await prices.end_price(actor_of(request), _id(price), if_version=expected_version(if_match))
        return single(_shown(ended), price_version(ended))

    return [list_, create, import_, retrieve, update, end]


def _id(price: str) -> UUID:
    id_ = as_id(price)
    if id_ is None:
        raise Unknown(f"there is no price {price[:100]!r}; list those of its route to see them")
    return id_


def _rate(name: str, text: str) -> Decimal:
    try:
        return parse_rate(name, text)
    except ConfigurationError as fault:
        raise Problem(400, f"{fault}.", field=name) from None


def _cursor(price: Price) -> str:
    return str(price.id)


def _shown(price: Price) -> PriceView:
    values: dict[str, Any] = {name: getattr(price, name) for name in PriceView.__struct_fields__}
    for name in RATES:
        if values[name] is not None:
            values[name] = _text(values[name])
    return PriceView(**values)


def _text(rate: Decimal) -> str:
    """Without the zeros that the database adds."""
    whole, _, fraction = f"{rate:f}".partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"
