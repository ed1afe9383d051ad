"""What one sequence holds of the KV cache, what it could hold, and what it waits for. Plain records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ELSEWHERE = -1
"""In a match's tables: a block that is not on the device but can be loaded."""


class SequenceBlocks:
    """What one sequence holds. Made by ``KVCache.sequence``; lives through preemption, without blocks."""

    __slots__ = (
        "first_kept",
        "load",
        "loaded_tokens",
        "names",
        "next_change",
        "num_named",
        "room",
        "root",
        "salted",
        "tables",
    )

    def __init__(self, root: bytes, salted: bool, num_groups: int) -> None:
        self.root = root
        self.salted = salted
        self.names: list[bytes] = []
        """Of the sequence's full blocks, as far as they were asked for; tokens are only ever appended."""
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        """For each cache group the block ids; NULL_BLOCK where the window has left one behind."""
        self.room = 0
        """Tokens that fit into the blocks held."""
        self.loaded_tokens = 0
        """Tokens that were in the cache at admission. Final when ``KVCache.loaded`` is true: failed loads lower it."""
        self.load: int | None = None
        """The transfer under way that fills some of the blocks."""
        self.num_named = 0
        """How many blocks of the sequence are full, final and dealt with."""
        self.first_kept: list[int] = [0] * num_groups
        """For each cache group the first block, sinks apart, that the window has not left."""
        self.next_change = sys.maxsize
        """With so many tokens computed, a block gets full or leaves a window."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable beginning of a sequence that is computed already. Holds nothing: it is true until blocks are
    handed out, so use it at once."""

    tokens: int
    """A multiple of the block size, below the number of the sequence's tokens."""
    host_tokens: int
    """How many of them stand in blocks that must be loaded first."""
    tables: list[list[int]]
    """For each cache group the blocks, as far as the match goes."""
    token_ids: Sequence[int]
    """What was matched."""
    removals: int
    """How many names had been forgotten by then."""


class LoadedBlock(NamedTuple):
    """A block on its way to the device."""

    group: int
    position: int
    block: int
    name: bytes
    parent: bytes | None
    token_ids: Sequence[int] | None


@dataclass(slots=True)
class Load:
    """A transfer that fills blocks of a sequence."""

    sequence: SequenceBlocks | None
    """Who waits; None once it has let go of its blocks."""
    blocks: list[LoadedBlock]
    wanted: bool = True
    """Whether the blocks may be found when they are there; not if the cache was reset in the meantime."""
