"""``/prompts``: what was said, read and erased by administrators. A viewer may not; who reads is on record."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, QueryParameter
from litestar.response import Stream
from msgspec import Meta

from gateway.administration.prompts import PromptAdministration
from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import Body, documented
from gateway.http.errors import Problem
from gateway.http.prompt_answer import (
    JSON_LINES,
    WANTED,
    Cursor,
    Limit,
    LoggedPrompt,
    PromptList,
    RequestRef,
    Text,
    Wanted,
    check_one_end_user,
    exported,
    listed,
    whole,
)
from gateway.promptlog.eraser import Receipt
from gateway.tenants.end_users import HASH_LENGTH
from gateway.tenants.records import as_id

Tenant = Annotated[str, QueryParameter(min_length=1, description="Whose: a tenant's name or id.")]


class Erasure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one request, else of one end user, else of the whole tenant."""

    tenant: Annotated[str, Meta(min_length=1, max_length=100)]
    """Name or id."""
    end_user: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    """By the id that the client sent."""
    end_user_hash: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{HASH_LENGTH}}}$")] | None = None
    """By the hash that entries and reports show."""
    request_id: UUID | None = None


_EXAMPLE = {"tenant": "demo", "end_user": "customer-17"}


def prompt_handlers(prompts: PromptAdministration) -> list[HTTPRouteHandler]:
    @get(
        "/prompts",
        role="admin",
        dependencies=WANTED,
        operation_id="listPrompts",
        operation_class=documented(403, 404),
        summary="List a tenant's logged requests, without their bodies, the newest first",
    )
    async def list_(
        tenant: Tenant,
        wanted: Wanted,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> PromptList:
        owner = await prompts.tenant_id(tenant)
        filters = wanted.of(owner, prompts.hash_end_user)
        return listed(await prompts.page(owner, filters, cursor=cursor, limit=limit))

    @get(
        "/prompts/search",
        role="admin",
        dependencies=WANTED,
        operation_id="searchPrompts",
        operation_class=documented(403, 404),
        summary="Look for a text in a tenant's logged requests and answers, some seconds at a time",
    )
    async def search(
        request: AnyRequest,
        tenant: Tenant,
        text: Text,
        wanted: Wanted,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> PromptList:
        owner = await prompts.tenant_id(tenant)
        filters = wanted.of(owner, prompts.hash_end_user)
        return listed(await prompts.scan(actor_of(request), owner, text, filters, cursor=cursor, limit=limit))

    @get(
        "/prompts/export",
        role="admin",
        dependencies=WANTED,
        operation_id="exportPrompts",
        operation_class=documented(403, 404),
        media_type=JSON_LINES,
        summary="Export a tenant's logged requests as lines of JSON, oldest first",
    )
    async def export(
        request: AnyRequest,
        tenant: Tenant,
        wanted: Wanted,
    ) -> Stream:
        owner = await prompts.tenant_id(tenant)
        filters = wanted.of(owner, prompts.hash_end_user)
        return await exported(prompts.export(actor_of(request), owner, filters))

    @get(
        "/prompts/{request_id:str}",
        role="admin",
        operation_id="retrievePrompt",
        operation_class=documented(403, 404),
        summary="Show one logged request, with what was said",
    )
    async def retrieve(request: AnyRequest, request_id: RequestRef, tenant: Tenant) -> Response[LoggedPrompt]:
        owner = await prompts.tenant_id(tenant)
        named = as_id(request_id)
        found = None if named is None else await prompts.entry(actor_of(request), owner, named)
        if found is None:
            raise Problem(404, f"Tenant {tenant[:100]!r} has no request {request_id[:100]!r} in its prompt log.")
        return whole(found)

    @post(
        "/prompts/erase",
        role="admin",
        status_code=200,
        dto=Body[Erasure],
        return_dto=None,
        operation_id="erasePrompts",
        operation_class=documented(403, 404, example=_EXAMPLE),
        summary="Erase what was said by a tenant, an end user or in a request, wherever it is kept",
    )
    async def erase(request: AnyRequest, data: JSONBody[Erasure]) -> Receipt:
        check_one_end_user(data.end_user, data.end_user_hash)
        if data.request_id is not None and (data.end_user or data.end_user_hash):
            raise Problem(400, "Erase one request or one end user, not both at once.", field="request_id")
        owner = await prompts.tenant_id(data.tenant)
        end_user = data.end_user_hash if data.end_user is None else prompts.hash_end_user(owner, data.end_user)
        receipt = await prompts.erase(actor_of(request), owner, end_user=end_user, request_id=data.request_id)
        if receipt.unfinished:
            left = "; ".join(f"{kind}: {reason}" for kind, reason in receipt.unfinished.items())
            raise Problem(
                503,
                f"Not all was erased ({left}). What was, is gone; send the request again for the rest.",
                headers={"retry-after": "5"},
            )
        return receipt

    return [list_, search, export, retrieve, erase]
