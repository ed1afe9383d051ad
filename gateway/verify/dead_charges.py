"""Usage events that Redis counts though they never became rows: those set aside, and those that were given up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.usage import UsageEvent
from gateway.db.tables import audit_log, dead_usage_events

_decoder = msgspec.json.Decoder(UsageEvent)


async def dead_charges(connection: AsyncConnection, tenant_id: UUID) -> list[UsageEvent]:
    """Those of a tenant that can be read, by when they were set aside."""
    discarded = select(audit_log.c.before["raw"].astext).where(
        audit_log.c.kind == "dead_event", audit_log.c.action == "discard"
    )
    raws: list[str | bytes] = list(await connection.scalars(discarded.order_by(audit_log.c.id)))
    raws += await connection.scalars(select(dead_usage_events.c.raw).order_by(dead_usage_events.c.id))
    return [event for event in _readable(raws) if event.tenant_id == tenant_id]


def _readable(raws: Iterable[str | bytes | None]) -> Iterable[UsageEvent]:
    for raw in raws:
        try:
            event = _decoder.decode(raw or b"")
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if event.admitted_at.tzinfo is not None:
            yield event


def explains(amounts: Sequence[int], difference: int) -> bool:
    """Whether a counter is off by just what was set aside since some moment: one built anew does not have what was set
    aside before."""
    since = 0
    for amount in reversed(amounts):
        since += amount
        if since == difference:
            return True
    return False
