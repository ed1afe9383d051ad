"""Device blocks that transfers read or write: kept from being reused until the transfer is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from worker.engine.block_pool import BlockPool
from worker.engine.plan import Tier, Transfer


class TransferLeases:
    """Leases on the blocks of one pool, from the moment a transfer is queued."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._queued: list[int] = []
        """Blocks of transfers that were not handed out yet."""
        self._open: dict[int, list[int]] = {}
        """By transfer that was handed out."""

    def __len__(self) -> int:
        """Transfers handed out that are not done."""
        return len(self._open)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._open

    def begin(self, blocks: Sequence[int]) -> None:
        """``blocks`` are part of a transfer that is queued."""
        self._pool.lease(blocks)
        self._queued += blocks

    def hand_out(self, transfers: Sequence[Transfer]) -> None:
        """These are all the transfers that were queued."""
        for transfer in transfers:
            side = 0 if transfer.source is Tier.DEVICE else 1
            self._open[transfer.id] = [pair[side] for pair in transfer.pairs]
        self._queued.clear()

    def end(self, transfer_id: int) -> None:
        """A transfer that was handed out is done."""
        self._pool.end_lease(self._open.pop(transfer_id))

    def counts(self) -> Counter[int]:
        """How often each block is leased."""
        counts = Counter(self._queued)
        for blocks in self._open.values():
            counts.update(blocks)
        return counts
