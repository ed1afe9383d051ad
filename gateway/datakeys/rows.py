"""Rows of data keys, read and made in one short transaction for many at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, Uuid, or_, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.datakeys.data_key import KEY_BYTES
from gateway.datakeys.loading import OfId, OfOwner
from gateway.datakeys.master_keys import MasterKeys
from gateway.db.engine import transaction
from gateway.db.tables import data_keys
from gateway.ids import uuid7

_OWNER = tuple_(data_keys.c.tenant_id, data_keys.c.end_user)
_ID = tuple_(data_keys.c.tenant_id, data_keys.c.id, types=[Uuid, Uuid])


async def read_batch(
    engine: AsyncEngine, master_keys: MasterKeys, owners: Sequence[OfOwner], ids: Sequence[OfId]
) -> Sequence[Row[Any]]:
    """The rows of ``owners``, made where there is none, and those of ``ids`` that are there.

    Raises DatabaseUnavailable.
    """
    async with transaction(engine) as connection:
        wanted = []
        if owners:
            wanted.append(_OWNER.in_([(owner.tenant_id, owner.end_user) for owner in owners]))
        if ids:
            wanted.append(_ID.in_([(each.tenant_id, each.key_id) for each in ids]))
        query = select(data_keys).where(or_(*wanted))
        rows = (await connection.execute(query)).all()
        there = {(row.tenant_id, row.end_user) for row in rows}
        missing = [owner for owner in owners if (owner.tenant_id, owner.end_user) not in there]
        if missing:
            # In one order everywhere, so that two replicas that make the same keys don't wait for each other in a ring.
            ordered = sorted(missing, key=lambda owner: (owner.tenant_id, owner.end_user))
            made = [_row(master_keys, owner) for owner in ordered]
            await connection.execute(insert(data_keys).values(made).on_conflict_do_nothing())
            # Another replica's may have been first.
            rows = (await connection.execute(query)).all()
    return rows


def _row(master_keys: MasterKeys, owner: OfOwner) -> dict[str, object]:
    key_id = uuid7()
    return {
        "id": key_id,
        "tenant_id": owner.tenant_id,
        "end_user": owner.end_user,
        "wrapped": master_keys.wrap(os.urandom(KEY_BYTES), owner.tenant_id, owner.end_user, key_id),
        "master_id": master_keys.current_id,
    }
