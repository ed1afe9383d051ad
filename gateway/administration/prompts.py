"""The prompt logs of all tenants as administrators have them: whoever reads what was said, or erases it, is written
down before.

Lists need no entry in the audit log, for they hold nothing of what was said.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import transaction
from gateway.promptlog.entry import Asked, Logged
from gateway.promptlog.eraser import Eraser, Receipt
from gateway.promptlog.filters import Filters
from gateway.promptlog.reader import Page, Reader
from gateway.redis_url import NoCacheRedis
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import find_tenant

HashEndUser = Callable[[UUID, str], str]
KIND: Final = "prompt"
"""What the audit log calls it."""
EVERYTHING: Final = "all"
"""Its target there, where it is not one request."""


class PromptAdministration:
    """``reader``, ``eraser``: None where there is no Redis for the log. ``hash_end_user``: makes the hash of a tenant's
    end user.

    Each method raises NoCacheRedis, DatabaseUnavailable, and what the reader raises; those that take an actor,
    NotAllowed for a viewer.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        reader: Reader | None,
        eraser: Eraser | None,
        hash_end_user: HashEndUser,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._eraser = eraser
        self.hash_end_user = hash_end_user

    @property
    def reader(self) -> Reader:
        """For who reads their own."""
        if self._reader is None:
            raise NoCacheRedis
        return self._reader

    async def tenant_id(self, ref: str) -> UUID:
        """By name or id, archived ones, too. Raises UnknownTenant."""
        async with transaction(self._engine) as connection:
            return (await find_tenant(connection, ref)).id

    async def page(self, tenant_id: UUID, filters: Filters, *, cursor: str | None, limit: int) -> Page:
        return await self.reader.page(tenant_id, filters, cursor=cursor, limit=limit)

    async def entry(self, actor: Actor, tenant_id: UUID, request_id: UUID) -> Logged | None:
        reader = self.reader
        await self._audit(actor, "read", str(request_id), tenant_id)
        return await reader.entry(tenant_id, request_id)

    async def asked(self, actor: Actor, tenant_id: UUID, request_id: UUID) -> tuple[Asked, Logged] | None:
        """What was asked, to be asked again, and the entry. Raises NotReplayable."""
        reader = self.reader
        await self._audit(actor, "replay", str(request_id), tenant_id)
        asked = await reader.asked(tenant_id, request_id)
        logged = await reader.entry(tenant_id, request_id)
        return None if asked is None or logged is None else (asked, logged)

    async def scan(
        self, actor: Actor, tenant_id: UUID, text: str, filters: Filters, *, cursor: str | None, limit: int
    ) -> Page:
        """The audit log has not the text, which may be somebody's."""
        reader = self.reader
        await self._audit(actor, "search", EVERYTHING, tenant_id, _told(filters))
        return await reader.scan(tenant_id, text, filters, cursor=cursor, limit=limit)

    async def export(self, actor: Actor, tenant_id: UUID, filters: Filters) -> AsyncGenerator[bytes, None]:
        reader = self.reader
        await self._audit(actor, "export", EVERYTHING, tenant_id, _told(filters))
        async with aclosing(reader.export(tenant_id, filters)) as lines:
            async for line in lines:
                yield line

    async def erase(
        self, actor: Actor, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None
    ) -> Receipt:
        """What there is of one request, else of one end user (a keyed hash), else all of the tenant's.

        The audit log tells that it was begun, and then has the receipt.
        """
        if self._eraser is None:
            raise NoCacheRedis
        target = EVERYTHING if request_id is None else str(request_id)
        asked = {} if end_user is None else {"end_user": end_user}
        await self._audit(actor, "erase", target, tenant_id, asked)
        if request_id is not None:
            receipt = await self._eraser.request(tenant_id, request_id)
        elif end_user is not None:
            receipt = await self._eraser.end_user(tenant_id, end_user)
        else:
            receipt = await self._eraser.tenant(tenant_id)
        await self._audit(actor, "erased", target, tenant_id, msgspec.structs.asdict(receipt))
        return receipt

    async def _audit(
        self, actor: Actor, action: str, target: str, tenant_id: UUID, after: Mapping[str, Any] | None = None
    ) -> None:
        actor.check_may_change()
        async with transaction(self._engine) as connection:
            await audit(connection, actor, action, KIND, target, tenant_id=tenant_id, after=after)


def _told(filters: Filters) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(filters).items() if value is not None}
