"""Changes of a worker's prefix cache, for whoever routes by it.

A block's content has a name (``worker.protocol.block_names``); an event says that a block of that name came to a tier
or left it. Blocks named with a tenant's salt carry no token ids.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks, each the parent of the next, can be found in ``tier`` from now on."""

    names: list[bytes]
    parent: bytes | None
    """Name of what comes before the first; None: nothing."""
    block_size: int
    token_ids: list[int] | None
    """The blocks' tokens in order; None if they are salted."""
    tier: str = "device"
    group: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks can't be found in ``tier`` any more."""

    names: list[bytes]
    tier: str = "device"
    group: int = 0


class CacheCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """No block can be found in any tier."""


KVEvent = BlockStored | BlockRemoved | CacheCleared
