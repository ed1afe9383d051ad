"""The paged KV cache as the scheduler sees it: blocks for sequences, found again by the names of their contents."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from worker.engine.block_pool import BlockPool, IntegrityError
from worker.engine.cache_events import CacheEvents
from worker.engine.cache_groups import CacheGroups
from worker.engine.kv_connector import KVConnector
from worker.engine.plan import NULL_BLOCK, CacheGroup, Tier, Transfer, TransferResult
from worker.engine.sequence_blocks import ELSEWHERE, Load, LoadedBlock, Match, SequenceBlocks
from worker.engine.transfer_leases import TransferLeases
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import KVEvent

__all__ = ["BlockPool", "IntegrityError", "KVCache", "Match", "SequenceBlocks"]


class KVCache:
    """Blocks of all cache groups from one pool; prefix caching; tiers beyond the device behind a connector.

    A sequence's life here: ``match`` what is computed already, ``admit`` it, then for each step ``extend`` and, when
    the step has retired, ``computed``; at the end, or on preemption, ``release``. A sequence only ever writes to
    blocks that it alone holds: hits are whole blocks before its first computed token.

    Only full blocks whose content is final are named. When two sequences compute the same content side by side, the
    one that is done first has its block named; the other's stays without a name, and is simply free at the end.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
        *,
        namer: BlockNamer | None = None,
        connector: KVConnector | None = None,
        record_events: bool = False,
        max_step_tokens: int | None = None,
    ) -> None:
        """``num_blocks`` counts the null block. Without ``namer`` nothing is cached.

        ``max_step_tokens``: most tokens of one sequence that can be scheduled and not yet computed. If given, groups
        with a window hold no more blocks than the window and so many tokens need; ``extend`` must then be called
        before every span, prefill chunks included.
        """
        if namer is not None and namer.block_size != block_size:
            raise ValueError(f"the namer's blocks have {namer.block_size} tokens, the cache's {block_size}")
        if connector is not None and namer is None:
            raise ValueError("a connector knows blocks by their names: without a namer there are none")
        self.block_size = block_size
        self._events = CacheEvents(block_size) if record_events else None
        self._pool = BlockPool(num_blocks, len(groups), self._events)
        self._groups = CacheGroups(groups, block_size, max_step_tokens)
        self._namer = namer
        self._connector = connector
        if connector is not None and self._events is not None:
            connector.attach(self._events)
        self._admitted: set[SequenceBlocks] = set()
        self._loads: dict[int, Load] = {}
        self._leases = TransferLeases(self._pool)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones among them."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held or leased, 0 to 1; cached ones are not."""
        return self._pool.usage

    @property
    def cached_blocks(self) -> int:
        """Free blocks whose content can still be found."""
        return self._pool.num_cached

    @property
    def additions(self) -> int:
        """How many blocks got names so far: while it stays the same, no match gets longer on the device."""
        return self._pool.additions

    @property
    def leased_blocks(self) -> int:
        """Blocks that will be free when the transfers that read or write them are done."""
        return self._pool.num_leased

    @property
    def transfers_open(self) -> int:
        """Transfers handed out that are not done."""
        return len(self._leases)

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of a sequence that has the pool to itself; ``sys.maxsize`` where windows bound what it holds."""
        return self._groups.max_sequence_tokens(self._pool.capacity)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` tokens holds at once, if it shares none."""
        return self._groups.most_blocks(num_tokens)

    def sequence(self, token_ids: Sequence[int], salt: str = "") -> SequenceBlocks:
        """A new sequence, without blocks. ``token_ids`` are not looked at before they are matched."""
        root = b"" if self._namer is None else self._namer.root(salt)
        return SequenceBlocks(root, bool(salt), len(self._groups))

    def match(self, seq: SequenceBlocks, token_ids: Sequence[int], *, read_cache: bool = True) -> Match:
        """How much of the beginning of ``token_ids`` is computed already; at least one token is left to compute."""
        limit = (len(token_ids) - 1) // self.block_size if read_cache and self._namer is not None else 0
        self._name_until(seq, token_ids, limit)
        hit = self._groups.longest_hit(lambda index: self._found(index, seq.names), limit)
        tables = []
        elsewhere: set[int] = set()
        for index, group in enumerate(self._groups.all):
            find = self._pool.by_name[index].get
            first = group.first_needed(hit * self.block_size)
            if group.window is None or first <= group.sinks:
                table = [find(name, ELSEWHERE) for name in seq.names[:hit]]
            else:
                table = [find(name, ELSEWHERE) for name in seq.names[: group.sinks]]
                table += [NULL_BLOCK] * (first - group.sinks)
                table += [find(name, ELSEWHERE) for name in seq.names[first:hit]]
            if self._connector is not None:
                elsewhere.update(position for position, block in enumerate(table) if block == ELSEWHERE)
            tables.append(table)
        return Match(hit * self.block_size, len(elsewhere) * self.block_size, tables, token_ids, self._removals)

    def admit(self, seq: SequenceBlocks, match: Match, num_tokens: int, *, reserve: int = 0) -> list[list[int]] | None:
        """Give ``seq`` the blocks of ``match`` and fresh ones up to ``num_tokens``; its block tables.

        None, and nothing has changed, if that would leave fewer than ``reserve`` blocks free. If ``match.host_tokens``
        is not 0, the sequence must not run before ``loaded``, and then with ``seq.tables`` and ``seq.loaded_tokens``
        as they are by that time. Raises RuntimeError if ``match`` is out of date.
        """
        if seq in self._admitted:
            raise RuntimeError("the sequence is admitted already")
        if match.removals != self._removals:
            raise RuntimeError("blocks were handed out since the match: what it found may be gone")
        pool = self._pool
        hit = match.tokens // self.block_size
        held = [block for table in match.tables for block in table if block > NULL_BLOCK]
        missing = sum(table.count(ELSEWHERE) for table in match.tables)
        ends = [max(hit, group.first_room(match.tokens, num_tokens)) for group in self._groups.all]
        fresh = missing + sum(end - hit for end in ends)
        if fresh + sum(map(pool.is_free, held)) + reserve > pool.num_free:
            return None
        pool.share(held)
        blocks = iter(pool.allocate(fresh))
        loads = []
        seq.tables = []
        for index, (found, end) in enumerate(zip(match.tables, ends, strict=True)):
            table = found.copy()
            for position in [p for p, block in enumerate(found) if block == ELSEWHERE] if missing else ():
                table[position] = next(blocks)
                loads.append(self._to_load(seq, match, index, position, table[position]))
            table += [next(blocks) for _ in range(end - hit)]
            seq.tables.append(table)
        self._admitted.add(seq)
        self._place(seq, hit)
        if loads:
            assert self._connector is not None
            self._leases.begin([entry.block for entry in loads])
            seq.load = self._connector.load([(entry.group, entry.name, entry.block) for entry in loads])
            self._loads[seq.load] = Load(seq, loads)
        return [table.copy() for table in seq.tables]

    def loaded(self, seq: SequenceBlocks) -> bool:
        """Whether no block of ``seq`` is on its way from another tier."""
        return seq.load is None

    def extend(self, seq: SequenceBlocks, num_tokens: int) -> list[list[int]] | None:
        """Let ``num_tokens`` tokens fit: for each cache group the blocks that its table gained, or an empty list if
        none had to. None, and nothing has changed, if not enough blocks are free."""
        if num_tokens <= seq.room:
            return []
        if seq not in self._admitted:
            raise RuntimeError("the sequence is not admitted")
        end = -(-num_tokens // self.block_size)
        counts = [max(0, end - len(table)) for table in seq.tables]
        needed = sum(counts)
        if needed > self._pool.num_free:
            return None
        blocks = self._pool.allocate(needed)
        gained = []
        for table, count in zip(seq.tables, counts, strict=True):
            gained.append(blocks[:count])
            del blocks[:count]
            table += gained[-1]
        seq.room = min(map(len, seq.tables)) * self.block_size
        return gained

    def computed(self, seq: SequenceBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """A step has retired: the KV of ``token_ids[:num_computed]`` is written and final.

        Blocks that it filled get their names; those that every window has left are let go.
        """
        if num_computed < seq.next_change:
            return
        if seq not in self._admitted or seq.load is not None or num_computed > min(seq.room, len(token_ids)):
            raise RuntimeError(f"the sequence can't have {num_computed} tokens computed")
        full = num_computed // self.block_size
        if self._namer is not None and full > seq.num_named:
            self._name_until(seq, token_ids, full)
            for index in range(len(self._groups)):
                self._register(seq, token_ids, index, full)
            seq.num_named = full
        for index, group in self._groups.windowed:
            first = group.first_needed(num_computed)
            kept = seq.first_kept[index]
            if first > kept:
                table = seq.tables[index]
                # The ones that were left first are the first to go: the tail of what is let go here is kept longest.
                self._pool.free(table[kept:first][::-1])
                table[kept:first] = [NULL_BLOCK] * (first - kept)
                seq.first_kept[index] = first
        self._await_change(seq)

    def release(self, seq: SequenceBlocks) -> None:
        """Take back all blocks, the tail's first; what has a name can be found until its block is handed out. A
        sequence that isn't admitted is left alone."""
        if seq not in self._admitted:
            return
        self._admitted.remove(seq)
        if seq.load is not None:
            self._loads[seq.load].sequence = None
            seq.load = None
        self._truncate(seq, 0)
        if self._connector is not None:
            for index in range(len(self._groups)):
                self._connector.touch(index, reversed(seq.names[: seq.num_named]))
        seq.num_named = 0

    def transfers(self) -> list[Transfer]:
        """What is to be submitted to the runner now, in this order: everything queued since the last call."""
        if self._connector is None:
            return []
        transfers = self._connector.transfers()
        self._leases.hand_out(transfers)
        return transfers

    def transfer_done(self, result: TransferResult) -> list[SequenceBlocks]:
        """A transfer has ended; the sequences that waited for it.

        ``loaded_tokens`` of each says how many tokens are there. If blocks failed, that is fewer than were matched,
        and its tables end there: it goes on like any other, computing from there.
        """
        if result.id not in self._leases or self._connector is None:
            raise RuntimeError(f"transfer {result.id} is not under way")
        self._connector.done(result)
        load = self._loads.pop(result.id, None)
        seq = None if load is None else load.sequence
        if load is not None:
            self._end_load(load, set(result.failed))
        self._leases.end(result.id)
        return [] if seq is None else [seq]

    def reset(self) -> bool:
        """Forget every cached block that no sequence holds, on every tier; whether nothing is left to be found."""
        if self._connector is not None:
            self._connector.reset()
        for load in self._loads.values():
            load.wanted = load.sequence is not None
        empty = self._pool.forget_unused()
        if empty and self._events is not None:
            self._events.cleared()
        return empty

    def events(self) -> list[KVEvent]:
        """What came to the cache and left it since the last call; nothing unless events are recorded."""
        return [] if self._events is None else self._events.drain()

    def check(self) -> None:
        """Raise IntegrityError unless free, cached, leased and held blocks make up the pool, each held as often as
        sequences hold it, and every name leads to its block."""
        held = Counter(
            block for seq in self._admitted for table in seq.tables for block in table if block != NULL_BLOCK
        )
        self._pool.check(held, self._leases.counts())
        if self._connector is not None:
            self._connector.check()

    @property
    def _removals(self) -> int:
        return self._pool.removals + (0 if self._connector is None else self._connector.removals)

    def _name_until(self, seq: SequenceBlocks, token_ids: Sequence[int], num_blocks: int) -> None:
        named = len(seq.names)
        if self._namer is not None and named < num_blocks:
            tokens = token_ids[named * self.block_size : num_blocks * self.block_size]
            seq.names += self._namer.chain(seq.names[-1] if named else seq.root, tokens)

    def _found(self, index: int, names: list[bytes]) -> Callable[[int], bool]:
        on_device = self._pool.by_name[index]
        if self._connector is None:
            return lambda position: names[position] in on_device
        contains = self._connector.contains
        return lambda position: names[position] in on_device or contains(index, names[position])

    def _to_load(self, seq: SequenceBlocks, match: Match, index: int, position: int, block: int) -> LoadedBlock:
        parent = seq.names[position - 1] if position else None
        tokens = self._told_tokens(seq, match.token_ids, position, position + 1)
        return LoadedBlock(index, position, block, seq.names[position], parent, tokens)

    def _told_tokens(self, seq: SequenceBlocks, token_ids: Sequence[int], start: int, end: int) -> Sequence[int] | None:
        """The tokens of blocks ``start`` to ``end`` as events tell them: not those of salted ones."""
        if self._events is None or seq.salted:
            return None
        return token_ids[start * self.block_size : end * self.block_size]

    def _register(self, seq: SequenceBlocks, token_ids: Sequence[int], index: int, full: int) -> None:
        """Name the blocks of one group from ``seq.num_named`` to ``full``, and have them stored elsewhere too."""
        table, names, name = seq.tables[index], seq.names, self._pool.name
        gained = [
            position
            for position in range(seq.num_named, full)
            if table[position] != NULL_BLOCK and name(table[position], index, names[position])
        ]
        if self._events is None and self._connector is None:
            return
        for start, end in _runs(gained):
            parent = names[start - 1] if start else None
            tokens = self._told_tokens(seq, token_ids, start, end)
            if self._events is not None:
                self._events.stored(Tier.DEVICE, index, names[start:end], parent, tokens)
            if self._connector is not None:
                self._leases.begin(self._connector.store(index, names[start:end], table[start:end], parent, tokens))

    def _end_load(self, load: Load, failed: set[int]) -> None:
        good = [entry for entry in load.blocks if entry.block not in failed]
        seq = load.sequence
        if seq is not None:
            seq.load = None
            if len(good) < len(load.blocks):
                lost = {(entry.group, entry.position) for entry in load.blocks if entry.block in failed}
                hit = self._longest_hit_without(seq, lost)
                # What lies behind is computed anew, into other blocks: these may be shared, or found from now on.
                self._truncate(seq, hit)
                self._place(seq, hit)
        if not load.wanted:
            return
        for entry in good:
            if self._pool.name(entry.block, entry.group, entry.name) and self._events is not None:
                self._events.stored(Tier.DEVICE, entry.group, [entry.name], entry.parent, entry.token_ids)

    def _longest_hit_without(self, seq: SequenceBlocks, lost: set[tuple[int, int]]) -> int:
        """Most blocks of what ``seq`` was admitted with that it can use when some of them are lost."""

        def present(index: int) -> Callable[[int], bool]:
            table = seq.tables[index]
            return lambda position: table[position] != NULL_BLOCK and (index, position) not in lost

        return self._groups.longest_hit(present, seq.loaded_tokens // self.block_size)

    def _place(self, seq: SequenceBlocks, hit: int) -> None:
        """``seq`` has ``hit`` blocks computed."""
        seq.num_named = hit
        seq.loaded_tokens = hit * self.block_size
        seq.first_kept = self._groups.first_kept(seq.loaded_tokens)
        seq.room = min(map(len, seq.tables)) * self.block_size
        self._await_change(seq)

    def _await_change(self, seq: SequenceBlocks) -> None:
        full = sys.maxsize if self._namer is None else (seq.num_named + 1) * self.block_size
        seq.next_change = min(full, self._groups.next_left_behind(seq.first_kept))

    def _truncate(self, seq: SequenceBlocks, length: int) -> None:
        """Let go of everything behind the first ``length`` blocks, the tail of all groups first."""
        if len(seq.tables) == 1:
            blocks = seq.tables[0][length:]
        else:
            rows = zip_longest(*(table[length:] for table in seq.tables), fillvalue=NULL_BLOCK)
            blocks = [block for row in rows for block in row]
        if self._groups.windowed:
            blocks = [block for block in blocks if block != NULL_BLOCK]
        self._pool.free(blocks)
        for table in seq.tables:
            del table[length:]
        seq.room = min(seq.room, length * self.block_size)


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of neighbours in ascending ``positions``: (first, one behind the last)."""
    start = 0
    for here in range(1, len(positions) + 1):
        if here == len(positions) or positions[here] != positions[here - 1] + 1:
            yield positions[start], positions[here - 1] + 1
            start = here
