"""``/dead-events``: usage that could not become a row of the ledger, to be looked at, tried again, or given up."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter

from gateway.billing.dead import DeadEvent, DeadEvents
from gateway.http.admin.gate import AnyRequest, actor_of
from gateway.http.admin.resource import (
    After,
    IfMatch,
    Page,
    PageSize,
    bad_cursor,
    check_immutable,
    documented,
    page_of,
    single,
)
from gateway.tenants.records import Unknown

EventRef = Annotated[str, PathParameter(description="Number of the event.")]
_LARGEST = 2**63 - 1


class DeadEventView(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    shard: str
    entry_id: str
    """Of the entry in the shard's stream."""
    revision: int | None
    error: str
    """Why it is no row."""
    raw: str
    """The event as it stood there; what is not UTF-8 is replaced."""
    recorded_at: datetime


class RetriedEvent(msgspec.Struct, frozen=True):
    request_id: UUID
    new: bool
    """False: the ledger had this request already, in this revision or a later one."""


def dead_event_handlers(dead: DeadEvents) -> list[HTTPRouteHandler]:
    @get("/dead-events", operation_id="listDeadEvents", operation_class=documented(), summary="List dead events")
    async def list_(limit: PageSize = 100, after: After = None) -> Page[DeadEventView]:
        begin = None if after is None else _number(after)
        if after is not None and begin is None:
            raise bad_cursor()
        found = await dead.list(after=begin, limit=limit + 1)
        shown, following = page_of(found, limit, lambda event: str(event.id))
        return Page([_shown(event) for event in shown], following)

    @get(
        "/dead-events/{event:str}",
        operation_id="retrieveDeadEvent",
        operation_class=documented(404, tagged=True),
        summary="Show a dead event",
    )
    async def retrieve(event: EventRef) -> Response[DeadEventView]:
        return single(_shown(await dead.get(_known(event))), 1)

    @post(
        "/dead-events/{event:str}/retry",
        role="admin",
        status_code=200,
        operation_id="retryDeadEvent",
        operation_class=documented(403, 404, 409),
        summary="Write a dead event's row, now that it can be written",
    )
    async def retry(request: AnyRequest, event: EventRef) -> RetriedEvent:
        retried = await dead.retry(actor_of(request), _known(event))
        return RetriedEvent(retried.request_id, retried.new)

    @delete(
        "/dead-events/{event:str}",
        role="admin",
        operation_id="discardDeadEvent",
        operation_class=documented(403, 404, 412),
        summary="Give a dead event up: the audit log keeps it, no report counts it",
    )
    async def discard(request: AnyRequest, event: EventRef, if_match: IfMatch = None) -> None:
        check_immutable("dead event", event, if_match)
        await dead.discard(actor_of(request), _known(event))

    return [list_, retrieve, retry, discard]


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    number = int(text)
    return number if number <= _LARGEST else None


def _known(event: str) -> int:
    number = _number(event)
    if number is None:
        raise Unknown(f"there is no dead event {event[:100]!r}; list them to see those there are")
    return number


def _shown(event: DeadEvent) -> DeadEventView:
    raw = event.raw.decode("utf-8", "replace")
    return DeadEventView(
        id=event.id,
        shard=event.shard,
        entry_id=event.entry_id,
        revision=event.revision,
        error=event.error,
        raw=raw,
        recorded_at=event.recorded_at,
    )
