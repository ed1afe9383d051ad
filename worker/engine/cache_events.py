"""What changed in the prefix cache since it was last asked, in order."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.plan import Tier
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvent

_TIER_NAMES = {Tier.DEVICE: "device", Tier.HOST: "host"}


class CacheEvents:
    """Collects events; neighbours that say the same of one chain become one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(
        self, tier: Tier, group: int, names: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int] | None
    ) -> None:
        """Blocks, each the parent of the next, can be found from now on. ``parent`` is None for a sequence's first
        block, ``token_ids`` for salted ones."""
        last = self._events[-1] if self._events else None
        name = _TIER_NAMES[tier]
        if (
            isinstance(last, BlockStored)
            and (last.tier, last.group, last.names[-1]) == (name, group, parent)
            and (last.token_ids is None) == (token_ids is None)
        ):
            last.names.extend(names)
            if last.token_ids is not None and token_ids is not None:
                last.token_ids.extend(token_ids)
            return
        ids = None if token_ids is None else list(token_ids)
        self._events.append(BlockStored(list(names), parent, self._block_size, ids, name, group))

    def removed(self, tier: Tier, group: int, name: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.tier, last.group) == (_TIER_NAMES[tier], group):
            last.names.append(name)
        else:
            self._events.append(BlockRemoved([name], _TIER_NAMES[tier], group))

    def cleared(self) -> None:
        # Whatever came before and nobody heard of is true no more.
        self._events = [CacheCleared()]

    def drain(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events
