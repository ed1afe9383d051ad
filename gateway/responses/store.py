"""Stored responses in Postgres: a tenant's own, sealed by the deployment's secret key, until they expire."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, tenant_transaction, transaction
from gateway.db.tables import stored_responses
from gateway.responses.conversation import Origins, Stored
from gateway.secret_key import SealBroken, SecretKey
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.principal import Principal

MOST_BYTES = 8 * 1024 * 1024
"""Larger responses, with the conversation that they were made of, are not kept."""
PURPOSE: Final = "response"
_ID = re.compile(r"resp_[0-9a-f]{32}")
_log = structlog.get_logger(__name__)
_decoder = msgspec.json.Decoder(Stored)


class ResponseStore:
    def __init__(
        self,
        engine: AsyncEngine,
        secret_key: SecretKey,
        clock: Clock,
        *,
        keep_days: int,
        count: Callable[[str], None] = lambda _outcome: None,
    ) -> None:
        """``keep_days``: how long a response can be found; 0: none is kept.

        ``count`` is told what became of each: ``stored``, ``too_large``, ``database_away`` or ``fault``.
        """
        self._engine = engine
        self._secret_key = secret_key
        self._clock = clock
        self._keep_days = keep_days
        self._count = count

    @property
    def keeps(self) -> bool:
        return self._keep_days > 0

    def origins(
        self, tenant_id: UUID, end_user: str | None, previous: tuple[str, Stored] | None = None
    ) -> Origins | None:
        """Of a new response. ``end_user``: as the client names it; ``previous``: what it is built upon, with its id."""
        whose = None if end_user is None else end_user_hash(self._secret_key, tenant_id, end_user)
        if previous is None:
            return Origins(() if whose is None else (whose,))
        response_id, stored = previous
        return None if stored.origins is None else stored.origins.after(response_id, whose)

    async def put(self, principal: Principal, response_id: str, stored: Stored) -> bool:
        """Keep it, if it can be; whether it was. Raises nothing."""
        fault: str | None = None
        try:
            outcome = await self._put(principal, response_id, stored)
        except DatabaseUnavailable as away:
            outcome, fault = "database_away", str(away)
        except DBAPIError as refused:
            # Without its statement and parameters: they are long.
            outcome, fault = "fault", str(refused.orig)
        except Exception:
            # Whatever it is, it must not cost the client an answer that is complete and paid.
            _log.exception("response_not_stored", response_id=response_id)
            outcome = "fault"
        self._count(outcome)
        if outcome != "stored":
            _log.warning("response_not_stored", response_id=response_id, reason=outcome, error=fault)
        return outcome == "stored"

    async def _put(self, principal: Principal, response_id: str, stored: Stored) -> str:
        value = msgspec.json.encode(stored)
        if len(value) > MOST_BYTES:
            return "too_large"
        now = self._clock.now()
        row = {
            "tenant_id": principal.tenant_id,
            "id": response_id,
            "project_id": principal.project_id,
            "sealed": self._secret_key.seal(PURPOSE, value, context=_context(principal.tenant_id, response_id)),
            "end_users": None if stored.origins is None else list(stored.origins.end_users),
            "built_upon": None if stored.origins is None else list(stored.origins.built_upon),
            "created_at": now,
            "expires_at": now + timedelta(days=self._keep_days),
        }
        async with transaction(self._engine) as connection:
            await connection.execute(insert(stored_responses).values(row).on_conflict_do_nothing())
        return "stored"

    async def get(self, tenant_id: UUID, response_id: str) -> Stored | None:
        """None for one that is not there, expired, or another tenant's. Raises DatabaseUnavailable."""
        if not _ID.fullmatch(response_id):
            return None
        wanted = select(stored_responses.c.sealed).where(
            stored_responses.c.tenant_id == tenant_id,
            stored_responses.c.id == response_id,
            stored_responses.c.expires_at > self._clock.now(),
        )
        async with tenant_transaction(self._engine, tenant_id) as connection:
            sealed = await connection.scalar(wanted)
        if sealed is None:
            return None
        try:
            return _decoder.decode(self._secret_key.unseal(PURPOSE, sealed, context=_context(tenant_id, response_id)))
        except (SealBroken, msgspec.DecodeError) as fault:
            _log.warning("stored_response_unreadable", response_id=response_id, error=str(fault))
            return None

    async def delete(self, tenant_id: UUID, response_id: str) -> bool:
        """Whether there was one. Raises DatabaseUnavailable."""
        if not _ID.fullmatch(response_id):
            return False
        unwanted = delete(stored_responses).where(
            stored_responses.c.tenant_id == tenant_id,
            stored_responses.c.id == response_id,
            stored_responses.c.expires_at > self._clock.now(),
        )
        async with transaction(self._engine) as connection:
            return (await connection.execute(unwanted)).rowcount > 0


def _context(tenant_id: UUID, response_id: str) -> bytes:
    return tenant_id.bytes + response_id.encode()
