"""A model of all that happens around a KV cache, which notices when a sequence reads what is not its own.

It keeps real slots. What is written at a position is a digest of the salt and of all tokens up to it, in its cache
group; before each write, everything that the token attends to is read back through the block table. So a block that is
shared wrongly, reused too early, named too early or named wrongly shows itself. Copies between the tiers take effect as
late as they can. A second book, made of events alone, says what should be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from worker.engine.kv_cache import KVCache, SequenceBlocks
from worker.engine.kv_connector import HostTier
from worker.engine.plan import NULL_BLOCK, CacheGroup, Tier, Transfer, TransferResult
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared

BLOCK_SIZE = 2
MAX_STEP = 6

Content = tuple[int, int] | None
"""Of a slot: cache group, digest of salt and tokens. None: nothing was ever written, or it is spoilt."""


class Live:
    """A sequence: running, waiting for a load, or preempted."""

    def __init__(self, seq: SequenceBlocks, token_ids: list[int], salt: str) -> None:
        self.seq = seq
        self.token_ids = token_ids
        self.salt = salt
        self.written = 0
        self.in_flight: int | None = None
        """Tokens that will be computed when the step in flight has retired."""


class Copy:
    """A transfer under way, with what its blocks held when it was submitted."""

    def __init__(self, transfer: Transfer, slots: dict[Tier, list[list[Content]]]) -> None:
        self.transfer = transfer
        self.sources = [slots[transfer.source][source].copy() for source, _ in transfer.pairs]
        self.destinations = [slots[transfer.destination][destination].copy() for _, destination in transfer.pairs]


class CacheModel:
    """Plays scheduler and runner. Where a method takes ``pick``, it chooses among what there is."""

    def __init__(self, num_blocks: int, groups: Sequence[CacheGroup], host_blocks: int, bounded: bool) -> None:
        self.groups = groups
        self.namer = BlockNamer("model", BLOCK_SIZE)
        self.kv = KVCache(
            num_blocks,
            BLOCK_SIZE,
            groups,
            namer=self.namer,
            connector=HostTier(host_blocks) if host_blocks else None,
            record_events=True,
            max_step_tokens=MAX_STEP if bounded else None,
        )
        self.slots: dict[Tier, list[list[Content]]] = {
            Tier.DEVICE: [[None] * BLOCK_SIZE for _ in range(num_blocks)],
            Tier.HOST: [[None] * BLOCK_SIZE for _ in range(host_blocks)],
        }
        self.live: list[Live] = []
        self.preempted: list[Live] = []
        self.copies: list[Copy] = []
        self.findable: set[tuple[str, int, bytes]] = set()
        self.seen: Counter[str] = Counter()
        """What happened, so that a test can tell whether it has tested anything."""

    # What the scheduler does

    def arrive(self, token_ids: list[int], salt: str = "", read_cache: bool = True, reserve: int = 0) -> Live | None:
        live = Live(self.kv.sequence(token_ids, salt), token_ids, salt)
        return live if self._admit(live, read_cache, reserve) else None

    def resume(self, pick: int) -> None:
        live = self.preempted[pick % len(self.preempted)]
        if self._admit(live, True, 0):
            self.preempted.remove(live)
            self.seen["resumed"] += 1

    def _admit(self, live: Live, read_cache: bool, reserve: int) -> bool:
        seq, token_ids = live.seq, live.token_ids
        free = self.kv.num_free
        match = self.kv.match(seq, token_ids, read_cache=read_cache)
        assert self.kv.num_free == free, "a match changes nothing"
        assert match.tokens == (self._expected_hit(live) if read_cache else 0)
        assert match.tokens % BLOCK_SIZE == 0
        assert match.tokens < len(token_ids), "nothing is left to compute"
        tables = self.kv.admit(seq, match, len(token_ids), reserve=reserve)
        if tables is None:
            assert self.kv.num_free == free
            assert seq.tables == [[] for _ in self.groups]
            return False
        assert self.kv.num_free >= reserve
        assert tables == seq.tables
        assert self.kv.loaded(seq) == (match.host_tokens == 0)
        live.written, live.in_flight = match.tokens, None
        self.live.append(live)
        self.seen.update(admitted=1, hits=match.tokens > 0, host_hits=match.host_tokens > 0)
        return True

    def ready(self) -> list[Live]:
        """Who can take part in the next step."""
        return [live for live in self.live if live.in_flight is None and self.kv.loaded(live.seq)]

    def step(self, live: Live, count: int) -> bool:
        """Compute up to ``count`` tokens; the step stays in flight. False if no block is free for it."""
        if live.written == len(live.token_ids):
            live.token_ids.append(len(live.token_ids) % 2)
        end = min(live.written + count, len(live.token_ids))
        tables = [table.copy() for table in live.seq.tables]
        free = self.kv.num_free
        gained = self.kv.extend(live.seq, end)
        if gained is None:
            assert self.kv.num_free == free
            assert live.seq.tables == tables
            return False
        if gained:
            assert live.seq.tables == [old + new for old, new in zip(tables, gained, strict=True)]
        for position in range(live.written, end):
            self._attend(live, position)
            self._write(live, position)
        live.written = live.in_flight = end
        return True

    def retire(self, live: Live) -> None:
        if live.in_flight is not None:
            self.kv.computed(live.seq, live.token_ids, live.in_flight)
            live.in_flight = None

    def let_go(self, live: Live, preempt: bool = False) -> None:
        self.retire(live)
        self.kv.release(live.seq)
        self.live.remove(live)
        assert live.seq.tables == [[] for _ in self.groups]
        if preempt:
            self.preempted.append(live)

    def run(self, live: Live) -> None:
        """Compute what is known of a sequence that can run, and let go of it."""
        self.retire(live)
        while live in self.ready() and live.written < len(live.token_ids) and self.step(live, MAX_STEP):
            self.retire(live)
        if live in self.ready():
            self.let_go(live)

    def reset(self) -> None:
        assert self.kv.reset() or self.live, "nobody holds a block, and yet some can be found"
        self.seen["resets"] += 1

    # What the runner does

    def submit(self) -> None:
        self.copies += [Copy(transfer, self.slots) for transfer in self.kv.transfers()]

    def finish(self, pick: int, fails: Callable[[int], bool] = lambda number: False) -> None:
        """End a transfer; its block ``number`` fails where ``fails`` says so."""
        copy = self.copies.pop(pick % len(self.copies))
        transfer, failed = copy.transfer, []
        from_slots, to_slots = self.slots[transfer.source], self.slots[transfer.destination]
        pairs = zip(transfer.pairs, copy.sources, copy.destinations, strict=True)
        for number, ((source, destination), was, before) in enumerate(pairs):
            assert from_slots[source] == was, "a block was written while it was copied"
            assert to_slots[destination] == before, "a block was written while it was filled"
            if fails(number):
                failed.append(destination)
                to_slots[destination] = [None] * BLOCK_SIZE
            else:
                to_slots[destination] = was
        loads = transfer.destination is Tier.DEVICE
        waited = [live for live in self.live if loads and live.seq.load == transfer.id]
        ended = self.kv.transfer_done(TransferResult(transfer.id, failed))
        assert [live.seq for live in waited] == ended
        for live in waited:
            assert self.kv.loaded(live.seq)
            good = live.seq.loaded_tokens
            assert good == live.written if not failed else good < live.written
            self.seen.update(loads=1, shortened=0 < good < live.written)
            live.written = good
        self.seen.update(orphans=loads and not waited, failures=bool(failed))

    # The slots

    def _content(self, live: Live, group: int, position: int) -> Content:
        return group, hash((live.salt, tuple(live.token_ids[: position + 1])))

    def _write(self, live: Live, position: int) -> None:
        for group, table in enumerate(live.seq.tables):
            block = table[position // BLOCK_SIZE]
            assert block != NULL_BLOCK
            others = [other for other in self.live if other is not live and block in other.seq.tables[group]]
            assert not others, "a block is written that someone else holds too"
            self.slots[Tier.DEVICE][block][position % BLOCK_SIZE] = self._content(live, group, position)

    def _attend(self, live: Live, position: int) -> None:
        for index, (group, table) in enumerate(zip(self.groups, live.seq.tables, strict=True)):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for seen in [*range(min(group.sinks, first)), *range(first, position)]:
                slot = self.slots[Tier.DEVICE][table[seen // BLOCK_SIZE]][seen % BLOCK_SIZE]
                assert slot == self._content(live, index, seen), f"position {seen} was lost or belongs to another"

    # The second book

    def _expected_hit(self, live: Live) -> int:
        """The longest beginning that the events of the past say can be found; by trying all."""
        names = self.namer.chain(self.namer.root(live.salt), live.token_ids[:-1])
        return next(
            hit * BLOCK_SIZE
            for hit in range(len(names), -1, -1)
            if all(
                ("device", index, names[position]) in self.findable or ("host", index, names[position]) in self.findable
                for index, group in enumerate(self.groups)
                for position in range(hit)
                if self._is_needed(group, position, hit)
            )
        )

    def _is_needed(self, group: CacheGroup, position: int, hit: int) -> bool:
        last = position * BLOCK_SIZE + BLOCK_SIZE - 1
        in_window = group.window is None or last > hit * BLOCK_SIZE - group.window
        return in_window or position * BLOCK_SIZE < group.sinks

    def check_events(self) -> None:
        for event in self.kv.events():
            match event:
                case CacheCleared():
                    self.findable.clear()
                case BlockRemoved():
                    gone = {(event.tier, event.group, name) for name in event.names}
                    assert len(gone) == len(event.names)
                    assert gone <= self.findable
                    self.findable -= gone
                case BlockStored():
                    come = {(event.tier, event.group, name) for name in event.names}
                    assert len(come) == len(event.names)
                    assert not come & self.findable, "stored twice"
                    self.findable |= come
                    self._check_tokens(event)

    def _check_tokens(self, event: BlockStored) -> None:
        """Salted blocks tell no tokens; the others tell those that their names are made of."""
        lives = [live for live in self.live + self.preempted if event.names[-1] in live.seq.names]
        if lives:
            assert (event.token_ids is None) == bool(lives[0].salt)
        if event.token_ids is not None:
            assert self.namer.chain(event.parent or self.namer.root(), event.token_ids) == event.names

    def check(self) -> None:
        """After every move: each block has just one use, and the events tell all."""
        self.kv.check()
        self.check_events()
        held = {block for live in self.live for table in live.seq.tables for block in table} - {NULL_BLOCK}
        assert len(held) + self.kv.leased_blocks + self.kv.num_free == self.kv.capacity
        assert self.kv.cached_blocks <= self.kv.num_free
        for live in self.live:
            for group, other in combinations(live.seq.tables, 2):
                assert not set(group) & set(other) - {NULL_BLOCK}, "two groups share a block"

    def close(self) -> None:
        """Everybody leaves: nothing may be left behind."""
        for live in self.live.copy():
            self.let_go(live)
        self.submit()
        while self.copies:
            self.finish(0)
        self.check()
        assert self.kv.num_free == self.kv.capacity, "a block was leaked"
        self.reset()
        assert self.kv.cached_blocks == 0
        self.check()
        assert not self.findable
