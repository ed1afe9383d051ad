"""Which KV blocks are free, who holds the others, and which can be found by the name of their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from worker.engine.cache_events import CacheEvents
from worker.engine.plan import NULL_BLOCK, Tier


class IntegrityError(AssertionError):
    """The bookkeeping of KV blocks contradicts itself: a fault of the engine."""


class BlockPool:
    """The blocks of one KV cache, by id; every operation is O(1) a block.

    A block is held by sequences, leased to a transfer that reads or writes it, or free. Free blocks are of two kinds:
    blank ones, and cached ones, whose content has a name and can be found until the block is handed out. Blank ones go
    first, the one freed last at the head; then the cached one that was freed longest ago. The null block is never
    handed out.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: CacheEvents | None = None) -> None:
        """``num_blocks`` counts the null block. Blocks are named within one of ``num_groups`` cache groups."""
        if num_blocks < 2:
            raise ValueError(f"a KV pool of {num_blocks} blocks has none to give: the null block is one of them")
        self.num_blocks = num_blocks
        self.removals = 0
        """How many names were forgotten so far: what was looked up before the last of them may be gone."""
        self.additions = 0
        """How many blocks got names so far: what was not found before the last of them may be there."""
        self.num_leased = 0
        """Blocks that only transfers keep from being free."""
        self._events = events
        self._blank = [block for block in range(num_blocks - 1, -1, -1) if block != NULL_BLOCK]
        """A stack: a sequence freed from its tail is taken up again from its head, so that ids ascend in a table."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self.by_name: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        """For each cache group: which block holds the content of that name. To be read, not written."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones among them."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the blocks that are held or leased, 0 to 1."""
        return 1.0 - self.num_free / self.capacity

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks that nobody else holds, ids ascending. The caller has seen that so many are free."""
        blank = self._blank
        if count > len(blank) + len(self._cached):
            raise RuntimeError(f"{count} KV blocks asked for, {self.num_free} free")
        start = max(0, len(blank) - count)
        blocks = blank[start:]
        del blank[start:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        blocks.sort()
        holders = self._holders
        for block in blocks:
            holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of ``blocks``, which are held, leased or cached already."""
        for block in blocks:
            if not self._holders[block] and not self._leases[block]:
                if self._names[block] is None:
                    raise RuntimeError(f"KV block {block} is free and cannot be shared")
                del self._cached[block]
            elif not self._holders[block]:
                self.num_leased -= 1
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each of a sequence's ``blocks``; the tail becomes free first.

        A sequence's beginning is likelier to be wanted again than its end, so it should be handed out last.
        """
        all_holders, leases, names = self._holders, self._leases, self._names
        for block in reversed(blocks):
            holders = all_holders[block] - 1
            if holders < 0:
                raise RuntimeError(f"KV block {block} is freed twice")
            all_holders[block] = holders
            if holders:
                continue
            if leases[block]:
                self.num_leased += 1
            elif names[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def is_free(self, block: int) -> bool:
        return not self._holders[block] and not self._leases[block]

    def lease(self, blocks: Iterable[int]) -> None:
        """Keep ``blocks``, which are held, from being free until ``end_lease``, whoever lets go of them."""
        for block in blocks:
            if self.is_free(block):
                raise RuntimeError(f"KV block {block} is free and cannot be leased")
            self._leases[block] += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Undo one ``lease``. What is free by that becomes so from the tail."""
        for block in reversed(blocks):
            if not self._leases[block]:
                raise RuntimeError(f"KV block {block} is not leased")
            self._leases[block] -= 1
            if self.is_free(block):
                self.num_leased -= 1
                if self._names[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def name(self, block: int, group: int, name: bytes) -> bool:
        """Let a held block be found by the name of its content; whether it can be.

        Where another block has that name already, that one stays the one to be found.
        """
        if self.is_free(block) or self._names[block] is not None:
            raise RuntimeError(f"KV block {block} is free or has a name, and can't be given one")
        if self.by_name[group].setdefault(name, block) != block:
            return False
        self._names[block] = name
        self._groups[block] = group
        self.additions += 1
        return True

    def forget_unused(self) -> bool:
        """Take the names of all blocks that no sequence holds; whether none is left with a name."""
        for group in self.by_name:
            for block in list(group.values()):
                if not self._holders[block]:
                    self._forget(block)
        # From the end of the order in which they would have gone.
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        return not any(self.by_name)

    def _forget(self, block: int) -> None:
        name, group = self._names[block], self._groups[block]
        assert name is not None
        self._names[block] = None
        del self.by_name[group][name]
        self.removals += 1
        if self._events is not None:
            self._events.removed(Tier.DEVICE, group, name)

    def check(self, holders: Mapping[int, int], leases: Mapping[int, int]) -> None:
        """Raise IntegrityError unless the blocks are held and leased just so often, and nothing else contradicts."""
        free = set(self._blank)
        if len(free) != len(self._blank) or free & self._cached.keys():
            raise IntegrityError("a KV block is in the free list twice")
        for block in range(self.num_blocks):
            if self._holders[block] != holders.get(block, 0):
                raise IntegrityError(
                    f"KV block {block} counts {self._holders[block]} holders and has {holders.get(block, 0)}"
                )
            if self._leases[block] != leases.get(block, 0):
                raise IntegrityError(
                    f"KV block {block} counts {self._leases[block]} leases and has {leases.get(block, 0)}"
                )
            name = self._names[block]
            listed = block in self._cached if name is not None else block in free
            if listed != (self.is_free(block) and block != NULL_BLOCK):
                raise IntegrityError(f"KV block {block} is in the wrong list, or in none")
            if name is not None and self.by_name[self._groups[block]].get(name) != block:
                raise IntegrityError(f"KV block {block} has a name by which it isn't found")
        idle = sum(1 for n, held in zip(self._leases, self._holders, strict=True) if n and not held)
        if self.num_leased != idle:
            raise IntegrityError(f"{idle} KV blocks are leased only, {self.num_leased} counted")
        named = sum(1 for name in self._names if name is not None)
        if named != sum(len(group) for group in self.by_name):
            raise IntegrityError("a name leads to a KV block that doesn't have it")
        if NULL_BLOCK in holders or NULL_BLOCK in leases or self._names[NULL_BLOCK] is not None:
            raise IntegrityError("the null block is in use")
