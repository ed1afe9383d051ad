"""From a text to the vector that Redis has of it: embedded, and turned by its tenant's key."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final
from uuid import UUID

from gateway.cache.guards import essence
from gateway.cache.parts import DataKeys, Embedder
from gateway.cache.turning import Turning

_MOST_TURNINGS: Final = 256
"""Some 30 kB each."""


class Vectors:
    def __init__(self, embedder: Embedder, keys: DataKeys) -> None:
        self.embedder = embedder
        self._keys = keys
        self._turnings: OrderedDict[UUID, Turning] = OrderedDict()

    async def vector(self, tenant_id: UUID, text: str) -> bytes:
        """float32. Raises DatabaseUnavailable, and whatever the embedder does."""
        # Courtesies say nothing, and push apart what asks for the same.
        plain = await self.embedder.embed(essence(text))
        key = await self._keys.key(tenant_id, None)
        turning = self._turnings.get(key.id)
        if turning is None:
            turning = self._turnings[key.id] = Turning(key, self.embedder.dimensions)
            if len(self._turnings) > _MOST_TURNINGS:
                self._turnings.popitem(last=False)
        else:
            self._turnings.move_to_end(key.id)
        return turning.turn(plain)
