"""The data keys in Postgres: made when first wanted, found by id when something is read, and erased."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.clock import Clock
from gateway.datakeys.data_key import DataKey
from gateway.datakeys.loading import Loaded, Loader, OfId, OfOwner, Wanted
from gateway.datakeys.master_keys import MasterKeys, UnknownMasterKey
from gateway.datakeys.rows import read_batch
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import data_keys
from gateway.secret_key import SealBroken

BATCH: Final = 200
REWRAP_TIMEOUT_S: Final = 10.0
ERASE_TIMEOUT_S: Final = 30.0
"""A tenant may have a key for each of a million end users."""
_log = structlog.get_logger(__name__)


class DataKeys:
    """One per process. Use as an async context manager around the time in which keys are asked for.

    A key is kept in this process for at most 5 s after it was read: so long after an erasure elsewhere it may still
    seal something, which nobody can read then.
    """

    def __init__(self, engine: AsyncEngine, master_keys: MasterKeys, clock: Clock) -> None:
        self._engine = engine
        self._master_keys = master_keys
        self._loader = Loader(self._load, clock)

    async def __aenter__(self) -> DataKeys:
        self._loader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._loader.stop()

    async def key(self, tenant_id: UUID, end_user_hash: str | None = None) -> DataKey:
        """The tenant's own, or one end user's; made if there is none. Raises DatabaseUnavailable, UnknownMasterKey."""
        slot = OfOwner(tenant_id, end_user_hash or "")
        key = _opened((await self._loader.get([slot]))[slot])
        if key is None:  # erased in the moment between its making and its reading
            raise DatabaseUnavailable("the data key was erased meanwhile; try again")
        return key

    async def keys(self, wanted: Collection[tuple[UUID, str | None]]) -> dict[tuple[UUID, str | None], DataKey]:
        """As ``key``, for many in one or two round trips, and only those that can be had now. Raises neither."""
        slots = {owner: OfOwner(owner[0], owner[1] or "") for owner in wanted}
        found = await self._loader.get(slots.values())
        return {owner: key for owner, slot in slots.items() if isinstance(key := found[slot], DataKey)}

    async def by_id(self, tenant_id: UUID, key_id: UUID) -> DataKey | None:
        """None: erased, or another tenant's. Raises DatabaseUnavailable, UnknownMasterKey."""
        return (await self.by_ids(tenant_id, [key_id]))[key_id]

    async def by_ids(self, tenant_id: UUID, key_ids: Collection[UUID]) -> dict[UUID, DataKey | None]:
        """As ``by_id``, for many in one round trip."""
        found = await self._loader.get([OfId(tenant_id, key_id) for key_id in key_ids])
        return {slot.key_id: _opened(key) for slot, key in found.items() if isinstance(slot, OfId)}

    async def living(self, tenant_id: UUID, key_ids: Collection[UUID]) -> set[UUID]:
        """Those of ``key_ids`` that are there at this moment. Raises DatabaseUnavailable."""
        wanted = select(data_keys.c.id).where(data_keys.c.tenant_id == tenant_id, data_keys.c.id.in_(key_ids))
        async with transaction(self._engine) as connection:
            return set(await connection.scalars(wanted))

    async def erase(self, tenant_id: UUID, end_user_hash: str | None = None) -> int:
        """Erase the end user's key, or all of the tenant's with None; returns how many there were.

        What they sealed cannot be read any more, here at once and elsewhere within 5 s. Raises DatabaseUnavailable.
        """
        unwanted = delete(data_keys).where(data_keys.c.tenant_id == tenant_id)
        if end_user_hash is not None:
            unwanted = unwanted.where(data_keys.c.end_user == end_user_hash)
        try:
            async with transaction(self._engine, timeout_s=ERASE_TIMEOUT_S) as connection:
                return (await connection.execute(unwanted)).rowcount
        finally:
            # Even if the commit's answer was lost: it may have been done.
            self._loader.forget(tenant_id)

    async def rewrap(self) -> int:
        """Wrap anew, by the current master key, all keys that a former one wrapped; returns how many.

        Several may run at once, and one that breaks off is run again. Serving goes on meanwhile. Raises
        DatabaseUnavailable.
        """
        count, after = 0, UUID(int=0)
        while (batch := await self._rewrap_batch(after)) is not None:
            wrapped, after = batch
            count += wrapped
        return count

    async def by_master_key(self) -> dict[str, int]:
        """How many keys each master key wraps, by its id. Raises DatabaseUnavailable."""
        counts = select(data_keys.c.master_id, func.count()).group_by(data_keys.c.master_id)
        async with transaction(self._engine) as connection:
            return {master_id: count for master_id, count in await connection.execute(counts)}

    @property
    def master_id(self) -> str:
        """Of the current master key."""
        return self._master_keys.current_id

    async def _rewrap_batch(self, after: UUID) -> tuple[int, UUID] | None:
        """Of the keys behind ``after``: how many were wrapped anew, and the last that was looked at; None: no more."""
        masters = self._master_keys
        wanted = (
            select(data_keys)
            .where(data_keys.c.master_id.in_(masters.former_ids), data_keys.c.id > after)
            .order_by(data_keys.c.id)
            .limit(BATCH)
            .with_for_update(skip_locked=True)
        )
        async with transaction(self._engine, timeout_s=REWRAP_TIMEOUT_S) as connection:
            rows = (await connection.execute(wanted)).all()
            anew = []
            for row in rows:
                place = (row.tenant_id, row.end_user, row.id)
                try:
                    secret = masters.unwrap(row.wrapped, row.master_id, *place)
                except SealBroken as fault:
                    # It opens nothing either way, and must not keep the others from being wrapped.
                    _log.error("data_key_not_rewrapped", key_id=str(row.id), error=str(fault))
                else:
                    anew.append({"key_id": row.id, "anew": masters.wrap(secret, *place)})
            if anew:
                change = update(data_keys).where(data_keys.c.id == bindparam("key_id"))
                await connection.execute(change.values(wrapped=bindparam("anew"), master_id=masters.current_id), anew)
        return (len(anew), rows[-1].id) if rows else None

    async def _load(self, wanted: Sequence[Wanted]) -> dict[Wanted, Loaded]:
        owners = [slot for slot in wanted if isinstance(slot, OfOwner)]
        ids = [slot for slot in wanted if isinstance(slot, OfId)]
        found: dict[Wanted, Loaded] = dict.fromkeys(wanted)
        for row in await read_batch(self._engine, self._master_keys, owners, ids):
            loaded: Loaded
            try:
                secret = self._master_keys.unwrap(row.wrapped, row.master_id, row.tenant_id, row.end_user, row.id)
                loaded = DataKey(row.id, secret)
            except (UnknownMasterKey, SealBroken) as fault:
                _log.error("data_key_unreadable", key_id=str(row.id), tenant_id=str(row.tenant_id), error=str(fault))
                loaded = UnknownMasterKey(str(fault))
            for slot in (OfOwner(row.tenant_id, row.end_user), OfId(row.tenant_id, row.id)):
                if slot in found:
                    found[slot] = loaded
        return found


def _opened(loaded: Loaded) -> DataKey | None:
    if isinstance(loaded, Exception):
        raise type(loaded)(str(loaded))  # another one for each who asked
    return loaded
