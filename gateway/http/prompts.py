"""``/v1/prompts``: what a tenant's requests said, for its own keys that may read it; and what clients think of it.

As with usage, a key reads the whole tenant's, whichever project it is of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Final
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import Meta

from gateway.administration.prompts import PromptAdministration
from gateway.http.admin.resource import Body
from gateway.http.handler_input import AnyRequest
from gateway.http.operations import TENANT_ERRORS, operation
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
    exported,
    listed,
    whole,
)
from gateway.http.tenant_gate import principal_of, tenant_gate
from gateway.promptlog.entry import MAX_COMMENT
from gateway.tenants.records import as_id
from gateway.tenants.service import Tenants
from worker.protocol.errors import ApiError

MAX_BODY_BYTES: Final = 64 * 1024
_READ: Final = ("prompts:read",)
_ERRORS: Final = TENANT_ERRORS | {
    "403": "The key lacks the scope `prompts:read`.",
    "404": "The prompt log has no such request, or it is another tenant's.",
}
_BUSY_ERRORS: Final = _ERRORS | {"429": "Another export of the tenant's runs."}
_FEEDBACK_ERRORS: Final = _ERRORS | {
    "400": "The body is not valid; `param` names the field.",
    "403": "The key has neither the scope `inference` nor `prompts:read`.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON, or is compressed.",
}


class NewFeedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    score: Annotated[float, Meta(ge=-1, le=1)]
    """From -1, bad, to 1, good; the last one that is given counts."""
    comment: Annotated[str, Meta(max_length=MAX_COMMENT)] | None = None


def tenant_prompt_handlers(
    tenants: Tenants, prompts: PromptAdministration, *, body_timeout_s: float
) -> list[HTTPRouteHandler]:
    searches: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()
    exports: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()
    guards = [tenant_gate(tenants, body_timeout_s=body_timeout_s)]
    tags = ["Prompt log"]

    @get(
        "/v1/prompts",
        scopes=_READ,
        deed="read prompts",
        guards=guards,
        dependencies=WANTED,
        operation_id="listOwnPrompts",
        operation_class=operation(_ERRORS),
        summary="List the tenant's logged requests, without their bodies, the newest first",
        tags=tags,
    )
    async def list_(request: AnyRequest, wanted: Wanted, limit: Limit = 50, cursor: Cursor = None) -> PromptList:
        owner = principal_of(request).tenant_id
        filters = wanted.of(owner, prompts.hash_end_user)
        return listed(await prompts.page(owner, filters, cursor=cursor, limit=limit))

    @get(
        "/v1/prompts/search",
        scopes=_READ,
        deed="read prompts",
        guards=guards,
        dependencies=WANTED,
        operation_id="searchOwnPrompts",
        operation_class=operation(_ERRORS),
        summary="Look for a text in the tenant's logged requests and answers, some seconds at a time",
        tags=tags,
    )
    async def search(
        request: AnyRequest, text: Text, wanted: Wanted, limit: Limit = 50, cursor: Cursor = None
    ) -> PromptList:
        owner = principal_of(request).tenant_id
        filters = wanted.of(owner, prompts.hash_end_user)
        # One at a time of each tenant: it keeps a thread busy for seconds.
        async with searches.setdefault(owner, asyncio.Lock()):
            return listed(await prompts.reader.scan(owner, text, filters, cursor=cursor, limit=limit))

    @get(
        "/v1/prompts/export",
        scopes=_READ,
        deed="read prompts",
        guards=guards,
        dependencies=WANTED,
        operation_id="exportOwnPrompts",
        operation_class=operation(_BUSY_ERRORS),
        media_type=JSON_LINES,
        summary="Export the tenant's logged requests as lines of JSON, oldest first",
        tags=tags,
    )
    async def export(request: AnyRequest, wanted: Wanted) -> Stream:
        owner = principal_of(request).tenant_id
        lines = prompts.reader.export(owner, wanted.of(owner, prompts.hash_end_user))
        return await exported(_alone(exports.setdefault(owner, asyncio.Lock()), lines))

    @get(
        "/v1/prompts/{request_id:str}",
        scopes=_READ,
        deed="read prompts",
        guards=guards,
        operation_id="retrieveOwnPrompt",
        operation_class=operation(_ERRORS),
        summary="Show one logged request, with what was said",
        tags=tags,
    )
    async def retrieve(request: AnyRequest, request_id: RequestRef) -> Response[LoggedPrompt]:
        named = as_id(request_id)
        reader = prompts.reader
        found = None if named is None else await reader.entry(principal_of(request).tenant_id, named)
        if found is None:
            raise _not_found(request_id)
        return whole(found)

    @post(
        "/v1/prompts/{request_id:str}/feedback",
        scopes=("inference", "prompts:read"),
        deed="give feedback",
        guards=guards,
        status_code=204,
        dto=Body[NewFeedback],
        return_dto=None,
        request_max_body_size=MAX_BODY_BYTES,
        operation_id="givePromptFeedback",
        operation_class=operation(_FEEDBACK_ERRORS),
        summary="Say what an answer was worth",
        tags=tags,
    )
    async def feedback(request: AnyRequest, request_id: RequestRef, data: JSONBody[NewFeedback]) -> None:
        named = as_id(request_id)
        owner = principal_of(request)
        reader, patterns = prompts.reader, owner.prompt_log.patterns
        if named is None or not await reader.feedback(
            owner.tenant_id, named, data.score, data.comment, patterns=patterns
        ):
            raise _not_found(request_id)

    return [list_, search, export, retrieve, feedback]


async def _alone(turn: asyncio.Lock, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """``lines``, unless another export has the turn. Raises ApiError (429)."""
    if turn.locked():
        raise ApiError(
            429,
            "An export of your organisation's prompts is running. Wait until it has ended.",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"retry-after": "5"},
        )
    async with turn, aclosing(lines):
        async for line in lines:
            yield line


def _not_found(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no request {request_id[:100]!r} of yours in the prompt log. Its id is the `x-request-id` of the "
        "answer; it is there some moments after the end, if your prompt log is on, until it is too old or erased.",
        param="request_id",
        code="not_found",
    )
