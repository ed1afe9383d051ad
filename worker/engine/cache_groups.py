"""Which blocks a cache group needs: all of them, or those that its window and its sinks still reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from worker.engine.plan import CacheGroup


class GroupBlocks:
    """One cache group in units of blocks. Positions below are indices into a sequence's block table."""

    def __init__(self, group: CacheGroup, block_size: int, max_step_tokens: int | None) -> None:
        """Raises ValueError for a window or sinks that the blocks can't keep to."""
        if group.window is not None and group.window < 1:
            raise ValueError(f"a cache group's window is {group.window}; a token attends to itself at least")
        if group.sinks < 0 or group.sinks % block_size:
            raise ValueError(f"a cache group has {group.sinks} sinks, not a multiple of the block size, {block_size}")
        self.window = group.window
        self.block_size = block_size
        self.sinks = group.sinks // block_size if group.window is not None else 0
        """Blocks at the beginning that stay."""
        self.most = sys.maxsize
        """Most blocks that one sequence holds at once, sinks included."""
        if group.window is not None and max_step_tokens is not None:
            # So many tokens in a row touch at most so many blocks, wherever they begin.
            tokens = group.window - 1 + max_step_tokens
            self.most = self.sinks + (tokens + block_size - 2) // block_size + 1

    def first_needed(self, num_tokens: int) -> int:
        """The first block, sinks apart, that what comes after ``num_tokens`` tokens attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size

    def next_left_behind(self, first: int) -> int:
        """How many tokens must be computed until block ``first`` is needed no more."""
        if self.window is None:
            return sys.maxsize
        return (first + 1) * self.block_size + self.window - 1

    def first_room(self, num_computed: int, num_tokens: int) -> int:
        """Length of the table with which a sequence begins that has ``num_computed`` tokens in the cache and
        ``num_tokens`` in all: no more than it will ever hold at once."""
        end = -(-num_tokens // self.block_size)
        if self.most == sys.maxsize:
            return end
        return min(end, max(self.first_needed(num_computed), self.sinks) + self.most - self.sinks)

    def longest_hit(self, present: Callable[[int], bool], limit: int) -> int:
        """Most blocks, up to ``limit``, that a sequence can find computed, where the block at a position is there if
        ``present`` says so."""
        if self.window is None:
            return leading(present, limit)
        sinks = leading(present, min(self.sinks, limit))
        if sinks < min(self.sinks, limit):
            return sinks
        hit = position = limit
        while hit > self.sinks:
            first = max(self.first_needed(hit * self.block_size), self.sinks)
            while position > first and present(position - 1):
                position -= 1
            if position <= first:
                return hit
            # The block before ``position`` is missing: no longer hit can reach over it.
            hit = position = position - 1
        return hit


def leading(present: Callable[[int], bool], limit: int) -> int:
    """How many positions from 0 on are present, up to ``limit``."""
    for position in range(limit):
        if not present(position):
            return position
    return limit


class CacheGroups:
    """All cache groups of one model."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, max_step_tokens: int | None) -> None:
        """Raises ValueError for no group, or a window or sinks that the blocks can't keep to."""
        if not groups:
            raise ValueError("a KV cache needs at least one cache group")
        self.block_size = block_size
        self.all = [GroupBlocks(group, block_size, max_step_tokens) for group in groups]
        self.windowed = [(index, group) for index, group in enumerate(self.all) if group.window is not None]
        self._full = [index for index, group in enumerate(self.all) if group.window is None]

    def __len__(self) -> int:
        return len(self.all)

    def longest_hit(self, present: Callable[[int], Callable[[int], bool]], limit: int) -> int:
        """Most blocks, up to ``limit``, that all groups can agree on; ``present`` gives a group's test of positions."""
        hit = limit
        for index in self._full:
            hit = leading(present(index), hit)
        # A shorter hit is as good for groups without a window; one with a window may not have what it needs for it.
        agreed = -1
        while hit != agreed:
            agreed = hit
            for index, group in self.windowed:
                hit = group.longest_hit(present(index), hit)
        return hit

    def first_kept(self, num_tokens: int) -> list[int]:
        """For each group the first block, sinks apart, that is needed after ``num_tokens`` tokens."""
        return [max(group.first_needed(num_tokens), group.sinks) for group in self.all]

    def next_left_behind(self, first_kept: Sequence[int]) -> int:
        """How many tokens must be computed until a window leaves one more block."""
        return min((group.next_left_behind(first_kept[index]) for index, group in self.windowed), default=sys.maxsize)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` tokens holds at once."""
        end = -(-num_tokens // self.block_size)
        return sum(min(end, group.most) for group in self.all)

    def max_sequence_tokens(self, capacity: int) -> int:
        """Most tokens of a sequence that has ``capacity`` blocks to itself; ``sys.maxsize`` if windows bound them."""

        def fits(blocks: int) -> bool:
            return self.most_blocks(blocks * self.block_size) <= capacity

        if fits(capacity + 1):
            return sys.maxsize
        low, high = 0, capacity + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * self.block_size
