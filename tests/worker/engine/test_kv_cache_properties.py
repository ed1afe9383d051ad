"""Whatever happens to the KV cache, every sequence reads what it, or someone with the same beginning, has written.

The machine below keeps real slots. What is written at a position is a digest of the salt and of all tokens up to it, in
its cache group; before each write, everything that the token attends to is read back through the block table. So a
block that is shared wrongly, reused too early, named too early or named wrongly shows itself. Copies between the tiers
take effect as late as they can. A second book, made of events alone, says what should be found.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.engine.kv_cache import KVCache, SequenceBlocks
from worker.engine.kv_connector import HostTier
from worker.engine.plan import NULL_BLOCK, CacheGroup, Tier, Transfer, TransferResult
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared

BLOCK_SIZE = 2
MAX_STEP = 6
GROUPS = [
    (CacheGroup(),),
    (CacheGroup(), CacheGroup(window=5)),
    (CacheGroup(window=3), CacheGroup(), CacheGroup(window=8)),
    (CacheGroup(window=4, sinks=2),),
    (CacheGroup(window=1), CacheGroup(window=6, sinks=4)),
]

Content = tuple[int, int] | None
"""Of a slot: cache group, digest of salt and tokens. None: nothing was ever written, or it is spoilt."""


class _Live:
    """A sequence with blocks: running, or waiting for a load."""

    def __init__(self, seq: SequenceBlocks, token_ids: list[int], salt: str) -> None:
        self.seq = seq
        self.token_ids = token_ids
        self.salt = salt
        self.written = 0
        self.in_flight: int | None = None
        """Tokens that will be computed when the step in flight has retired."""


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 30),
        groups=st.sampled_from(GROUPS),
        host_blocks=st.sampled_from([0, 3, 12, 60]),
        bounded=st.booleans(),
    )
    def start(self, num_blocks: int, groups: tuple[CacheGroup, ...], host_blocks: int, bounded: bool) -> None:
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
        self.live: list[_Live] = []
        self.preempted: list[_Live] = []
        self.transfers: list[tuple[Transfer, list[list[Content]], list[list[Content]]]] = []
        """With what their sources and destinations held when they were submitted."""
        self.findable: set[tuple[str, int, bytes]] = set()

    # What the scheduler does

    @precondition(lambda self: len(self.live) < 6)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        shared=st.integers(0, 12),
        salt=st.sampled_from(["", "", "acme", "globex"]),
        read_cache=st.sampled_from([True, True, True, False]),
        reserve=st.integers(0, 2),
    )
    def arrive(self, prompt: list[int], shared: int, salt: str, read_cache: bool, reserve: int) -> None:
        token_ids = [7] * shared + prompt
        self.admit(_Live(self.kv.sequence(token_ids, salt), token_ids, salt), read_cache, reserve)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.preempted))
        if self.admit(live, True, 0):
            self.preempted.remove(live)

    def admit(self, live: _Live, read_cache: bool, reserve: int) -> bool:
        seq, token_ids = live.seq, live.token_ids
        free = self.kv.num_free
        match = self.kv.match(seq, token_ids, read_cache=read_cache)
        assert self.kv.num_free == free, "a match changes nothing"
        assert match.tokens == (self.expected_hit(live) if read_cache else 0)
        assert match.tokens % BLOCK_SIZE == 0
        assert match.tokens < len(token_ids), "nothing is left to compute"
        tables = self.kv.admit(seq, match, len(token_ids), reserve=reserve)
        if tables is None:
            assert self.kv.num_free == free
            assert seq.tables == [[] for _ in self.groups]
            return False
        assert self.kv.num_free >= reserve
        assert tables == seq.tables
        live.written = match.tokens
        live.in_flight = None
        self.live.append(live)
        assert self.kv.loaded(seq) == (match.host_tokens == 0)
        return True

    @precondition(lambda self: any(self.is_ready(live) for live in self.live))
    @rule(data=st.data(), count=st.integers(1, MAX_STEP))
    def step(self, data: st.DataObject, count: int) -> None:
        live = data.draw(st.sampled_from([live for live in self.live if self.is_ready(live)]))
        if live.written == len(live.token_ids):
            live.token_ids.append(len(live.token_ids) % 2)
        end = min(live.written + count, len(live.token_ids))
        tables = [table.copy() for table in live.seq.tables]
        free = self.kv.num_free
        gained = self.kv.extend(live.seq, end)
        if gained is None:
            assert self.kv.num_free == free
            assert live.seq.tables == tables
            return
        if gained:
            assert live.seq.tables == [old + new for old, new in zip(tables, gained, strict=True)]
        for position in range(live.written, end):
            self.attend(live, position)
            self.write(live, position)
        live.written = live.in_flight = end

    def is_ready(self, live: _Live) -> bool:
        return live.in_flight is None and self.kv.loaded(live.seq)

    @precondition(lambda self: any(live.in_flight for live in self.live))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retire_step(data.draw(st.sampled_from([live for live in self.live if live.in_flight])))

    def retire_step(self, live: _Live) -> None:
        if live.in_flight is not None:
            self.kv.computed(live.seq, live.token_ids, live.in_flight)
            live.in_flight = None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempt=st.booleans())
    def let_go(self, data: st.DataObject, preempt: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.retire_step(live)
        self.kv.release(live.seq)
        self.live.remove(live)
        assert live.seq.tables == [[] for _ in self.groups]
        if preempt:
            self.preempted.append(live)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() or self.live, "nobody holds a block, and yet some can be found"

    # What the runner does

    @rule()
    def submit(self) -> None:
        for transfer in self.kv.transfers():
            sources = [self.slots[transfer.source][source].copy() for source, _ in transfer.pairs]
            destinations = [self.slots[transfer.destination][destination].copy() for _, destination in transfer.pairs]
            self.transfers.append((transfer, sources, destinations))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def end_transfer(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.transfers) - 1))
        transfer, sources, destinations = self.transfers.pop(position)
        fails = data.draw(st.sampled_from([False, False, True]))
        failed = []
        for (source, destination), was, before in zip(transfer.pairs, sources, destinations, strict=True):
            assert self.slots[transfer.source][source] == was, "a block was written while it was copied"
            assert self.slots[transfer.destination][destination] == before, "a block was written to while it was filled"
            if fails and data.draw(st.booleans()):
                failed.append(destination)
                self.slots[transfer.destination][destination] = [None] * BLOCK_SIZE
            else:
                self.slots[transfer.destination][destination] = was
        waited = [live for live in self.live if live.seq.load == transfer.id and transfer.destination is Tier.DEVICE]
        ended = self.kv.transfer_done(TransferResult(transfer.id, failed))
        assert [live.seq for live in waited] == ended
        for live in waited:
            assert self.kv.loaded(live.seq)
            assert live.seq.loaded_tokens == live.written or failed
            assert live.seq.loaded_tokens <= live.written
            live.written = live.seq.loaded_tokens

    # The slots

    def content(self, live: _Live, group: int, position: int) -> Content:
        return group, hash((live.salt, tuple(live.token_ids[: position + 1])))

    def write(self, live: _Live, position: int) -> None:
        for group, table in enumerate(live.seq.tables):
            block = table[position // BLOCK_SIZE]
            assert block != NULL_BLOCK
            others = [other for other in self.live if other is not live and block in other.seq.tables[group]]
            assert not others, "a block is written that someone else holds too"
            self.slots[Tier.DEVICE][block][position % BLOCK_SIZE] = self.content(live, group, position)

    def attend(self, live: _Live, position: int) -> None:
        for index, (group, table) in enumerate(zip(self.groups, live.seq.tables, strict=True)):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for seen in [*range(min(group.sinks, first)), *range(first, position)]:
                slot = self.slots[Tier.DEVICE][table[seen // BLOCK_SIZE]][seen % BLOCK_SIZE]
                assert slot == self.content(live, index, seen), f"position {seen} was lost or belongs to another"

    # The second book

    def expected_hit(self, live: _Live) -> int:
        """The longest beginning that the events of the past say can be found; by trying all."""
        names = self.namer.chain(self.namer.root(live.salt), live.token_ids[:-1])
        return next(
            hit * BLOCK_SIZE
            for hit in range(len(names), -1, -1)
            if all(
                ("device", index, names[position]) in self.findable or ("host", index, names[position]) in self.findable
                for index, group in enumerate(self.groups)
                for position in range(hit)
                if self.is_needed(group, position, hit)
            )
        )

    def is_needed(self, group: CacheGroup, position: int, hit: int) -> bool:
        last = position * BLOCK_SIZE + BLOCK_SIZE - 1
        in_window = group.window is None or last > hit * BLOCK_SIZE - group.window
        return in_window or position * BLOCK_SIZE < group.sinks

    @invariant()
    def the_events_tell_all(self) -> None:
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
                    if event.token_ids is not None:
                        parent = event.parent or self.namer.root()
                        assert self.namer.chain(parent, event.token_ids) == event.names

    @invariant()
    def nothing_is_lost(self) -> None:
        self.kv.check()
        held = {block for live in self.live for table in live.seq.tables for block in table} - {NULL_BLOCK}
        assert len(held) + self.kv.leased_blocks + self.kv.num_free == self.kv.capacity
        assert self.kv.cached_blocks <= self.kv.num_free
        for live in self.live:
            for group, other in pairwise(live.seq.tables):
                assert not set(group) & set(other) - {NULL_BLOCK}, "two groups share a block"

    def teardown(self) -> None:
        for live in list(self.live):
            self.retire_step(live)
            self.kv.release(live.seq)
        self.live.clear()
        for transfer in self.kv.transfers():
            self.transfers.append((transfer, [], []))
        for transfer, _, _ in self.transfers:
            assert self.kv.transfer_done(TransferResult(transfer.id)) == []
        self.kv.check()
        assert self.kv.num_free == self.kv.capacity, "a block was leaked"
        assert self.kv.reset()
        assert self.kv.cached_blocks == 0


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestKVCache = CacheMachine.TestCase
