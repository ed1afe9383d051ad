"""Which KV blocks are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from worker.engine.plan import NULL_BLOCK


class BlockPool:
    """The blocks of one KV cache, by id; every operation is O(1) a block.

    A block is free, or held by one sequence or more. Free blocks are handed out in the order in which they were
    freed, so that what was freed last keeps its content longest. The null block is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` counts the null block."""
        if num_blocks < 2:
            raise ValueError(f"a KV pool of {num_blocks} blocks has none to give: the null block is one of them")
        self.num_blocks = num_blocks
        self._free = deque(block for block in range(num_blocks) if block != NULL_BLOCK)
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / self.capacity

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks that nobody else holds. The caller has seen that so many are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of ``blocks``, which are held already."""
        for block in blocks:
            if self._holders[block] == 0:
                raise RuntimeError(f"KV block {block} is free and cannot be shared")
            self._holders[block] += 1

    def free(self, blocks: list[int]) -> None:
        """One holder less for each of a sequence's ``blocks``; the tail becomes free first.

        A sequence's beginning is likelier to be wanted again than its end, so it should be handed out last.
        """
        for block in reversed(blocks):
            holders = self._holders[block]
            if holders == 0:
                raise RuntimeError(f"KV block {block} is freed twice")
            self._holders[block] = holders - 1
            if holders == 1:
                self._free.append(block)
