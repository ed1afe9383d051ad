"""What was said, erased: by tenant, by end user, by request; here and in the other rooms that keep some of it.

Without its data key nothing of a tenant's or an end user's can be read any more, wherever a copy of it lies: in Redis'
dump and append-only file, in a backup. So the key goes first, and what it sealed is removed behind it. A single request
has no key of its own: it is removed from Redis, and from Redis' files when these are written anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final, Literal, Protocol
from uuid import UUID

import msgspec
import structlog

from gateway.admission.redis import RedisClient, RedisUnavailable
from gateway.clock import Clock
from gateway.datakeys.service import DataKeys
from gateway.db.engine import DatabaseUnavailable
from gateway.ids import uuid7
from gateway.promptlog.store import Store

BATCH: Final = 1000
_log = structlog.get_logger(__name__)


class Erasable(Protocol):
    """A room that keeps something of what was said."""

    @property
    def kind(self) -> str:
        """What it keeps, as receipts name it: ``cached_answers``."""
        ...

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
        """Erase what there is of one request, else of one end user (a keyed hash), else of all; returns how much.

        Raises RedisUnavailable or DatabaseUnavailable; it can be done again then.
        """
        ...


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased. Anything in ``unfinished`` wants another try; it does no harm to the rest."""

    id: UUID
    tenant_id: UUID
    scope: Literal["tenant", "end_user", "request"]
    end_user: str | None = None
    """Keyed hash."""
    request_id: UUID | None = None
    erased_at: datetime
    """When it began: requests admitted before are not logged any more either."""
    counts: dict[str, int]
    """By kind, as ``data_keys``, ``logged_prompts``, and what the other rooms keep."""
    unfinished: dict[str, str]
    """By kind, why it failed."""


class Eraser:
    """``others``: the rooms beside the prompt log. ``redis``: a connection of its own."""

    def __init__(self, redis: RedisClient, data_keys: DataKeys, clock: Clock, others: Sequence[Erasable] = ()) -> None:
        self._store = Store(redis)
        self._data_keys = data_keys
        self._clock = clock
        self._others = tuple(others)

    async def tenant(self, tenant_id: UUID) -> Receipt:
        """All of the tenant's. Raises nothing that Redis or Postgres do: the receipt says what is unfinished."""
        steps = _Steps(self._clock.now())
        await steps.take("logged_prompts", partial(self._mark, tenant_id, ""))
        await steps.take("data_keys", partial(self._data_keys.erase, tenant_id))
        await steps.take("logged_prompts", partial(self._remove_unreadable, tenant_id))
        await steps.take("logged_prompts", partial(self._store.remove_orphans, tenant_id))
        for room in self._others:
            await steps.take(room.kind, partial(room.erase, tenant_id))
        return self._receipt(tenant_id, "tenant", steps)

    async def end_user(self, tenant_id: UUID, end_user: str) -> Receipt:
        """All of one end user's. ``end_user``: keyed hash. Raises as ``tenant``."""
        steps = _Steps(self._clock.now())
        await steps.take("logged_prompts", partial(self._mark, tenant_id, end_user))
        await steps.take("data_keys", partial(self._data_keys.erase, tenant_id, end_user))
        await steps.take("logged_prompts", partial(self._remove_unreadable, tenant_id))
        for room in self._others:
            await steps.take(room.kind, partial(room.erase, tenant_id, end_user=end_user))
        return self._receipt(tenant_id, "end_user", steps, end_user=end_user)

    async def request(self, tenant_id: UUID, request_id: UUID) -> Receipt:
        """What there is of one request. Raises as ``tenant``."""
        steps = _Steps(self._clock.now())
        await steps.take("logged_prompts", partial(self._mark, tenant_id, str(request_id)))
        await steps.take("logged_prompts", partial(self._remove_one, tenant_id, request_id))
        for room in self._others:
            await steps.take(room.kind, partial(room.erase, tenant_id, request_id=request_id))
        return self._receipt(tenant_id, "request", steps, request_id=request_id)

    async def _mark(self, tenant_id: UUID, whose: str) -> int:
        """So that what still comes of requests of before is left out, on every replica."""
        await self._store.mark_erased(tenant_id, whose)
        return 0

    async def _remove_one(self, tenant_id: UUID, request_id: UUID) -> int:
        row = await self._store.row(tenant_id, request_id)
        return 0 if row is None else await self._store.remove(tenant_id, [row.place])

    async def _remove_unreadable(self, tenant_id: UUID) -> int:
        """All entries whose key is gone: so also what another replica wrote by a key that it did not know to be erased,
        and what an erasure left that broke off.
        """
        removed, after = 0, ""
        newest = await self._store.newest_place(tenant_id)  # else it would follow those who write, for ever
        while newest and (heads := await self._store.heads(tenant_id, after, newest, BATCH)):
            living = await self._data_keys.living(tenant_id, {key_id for _, key_id in heads})
            removed += await self._store.remove(tenant_id, [place for place, key_id in heads if key_id not in living])
            after = heads[-1][0]
        return removed

    def _receipt(
        self,
        tenant_id: UUID,
        scope: Literal["tenant", "end_user", "request"],
        steps: _Steps,
        *,
        end_user: str | None = None,
        request_id: UUID | None = None,
    ) -> Receipt:
        return Receipt(
            id=uuid7(),
            tenant_id=tenant_id,
            scope=scope,
            end_user=end_user,
            request_id=request_id,
            erased_at=steps.began_at,
            counts=steps.counts,
            unfinished=steps.unfinished,
        )


class _Steps:
    """Each is tried, whatever became of those before it."""

    def __init__(self, began_at: datetime) -> None:
        self.began_at = began_at
        self.counts: dict[str, int] = {}
        self.unfinished: dict[str, str] = {}

    async def take(self, kind: str, step: Callable[[], Awaitable[int]]) -> None:
        self.counts.setdefault(kind, 0)
        try:
            self.counts[kind] += await step()
        except (RedisUnavailable, DatabaseUnavailable) as fault:
            self.unfinished[kind] = str(fault)
        except Exception as fault:
            # One room's fault must not keep the others' from being erased.
            _log.exception("erasure_failed", kind=kind)
            self.unfinished[kind] = f"a fault in erasing them ({type(fault).__name__}); the log says more"
