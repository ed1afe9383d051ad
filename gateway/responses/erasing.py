"""Stored responses, erased with what else was said: also those that were built upon it, for each holds its whole
conversation.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import ColumnElement, and_, any_, delete, literal, or_
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import transaction
from gateway.db.tables import stored_responses
from gateway.translation.responses_answer import response_id

_TIMEOUT_S: Final = 30.0


class StoredResponses:
    """As the eraser of the prompt log has them."""

    kind: Final = "stored_responses"

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
        """Those that have to do with the request, else with the end user (a keyed hash), else all. What an earlier
        release stored does not tell of that, and goes with them. Raises DatabaseUnavailable.
        """
        table = stored_responses.c
        unwanted = delete(stored_responses).where(table.tenant_id == tenant_id)
        if request_id is not None:
            unwanted = unwanted.where(_of_request(request_id))
        elif end_user is not None:
            unwanted = unwanted.where(or_(literal(end_user) == any_(table.end_users), table.end_users.is_(None)))
        async with transaction(self._engine, timeout_s=_TIMEOUT_S) as connection:
            return (await connection.execute(unwanted)).rowcount


def _of_request(request_id: UUID) -> ColumnElement[bool]:
    table, own = stored_responses.c, response_id(request_id.hex)
    unknown: ColumnElement[bool] = table.built_upon.is_(None)
    if request_id.version == 7:
        # Nothing was built upon it before it came.
        came = datetime.fromtimestamp((request_id.int >> 80) / 1000, UTC)
        unknown = and_(unknown, table.created_at >= came)
    return or_(table.id == own, literal(own) == any_(table.built_upon), unknown)
