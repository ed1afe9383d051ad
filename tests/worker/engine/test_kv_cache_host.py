"""The host tier behind the cache: written through, loaded back, leased while copied, doubted when a copy fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from worker.engine.kv_cache import KVCache, SequenceBlocks
from worker.engine.kv_connector import HostTier
from worker.engine.plan import CacheGroup, Tier, TransferResult
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared

NAMER = BlockNamer("model", 4)


class Tiers:
    """A small pool with a host tier behind it. Blocks of 4 tokens."""

    def __init__(self, num_blocks: int = 9, host_blocks: int = 40, groups: Sequence[CacheGroup] = (CacheGroup(),)):
        self.num_groups = len(groups)
        self.host = HostTier(host_blocks)
        self.kv = KVCache(num_blocks, 4, groups, namer=NAMER, connector=self.host, record_events=True)

    def admit(self, token_ids: Sequence[int], salt: str = "") -> SequenceBlocks:
        seq = self.kv.sequence(token_ids, salt)
        assert self.kv.admit(seq, self.kv.match(seq, token_ids), len(token_ids)) is not None
        return seq

    def compute(self, token_ids: Sequence[int], salt: str = "") -> None:
        seq = self.admit(token_ids, salt)
        self.kv.computed(seq, token_ids, len(token_ids))
        self.kv.release(seq)

    def copy(self) -> None:
        for transfer in self.kv.transfers():
            self.kv.transfer_done(TransferResult(transfer.id))
        self.kv.check()

    def serve(self, token_ids: Sequence[int], salt: str = "") -> None:
        self.compute(token_ids, salt)
        self.copy()

    def evict(self) -> None:
        """Take every free block for a moment."""
        tokens = [999] * (self.kv.num_free // self.num_groups * 4)
        seq = self.kv.sequence(tokens, "")
        assert self.kv.admit(seq, self.kv.match(seq, tokens, read_cache=False), len(tokens)) is not None
        self.kv.release(seq)
        self.kv.check()

    def hit(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, int]:
        match = self.kv.match(self.kv.sequence(token_ids, salt), token_ids)
        return match.tokens, match.host_tokens


def test_a_block_is_written_through_when_it_gets_its_name() -> None:
    tiers = Tiers()
    seq = tiers.admit(range(10))
    assert tiers.kv.transfers() == []
    tiers.kv.computed(seq, range(10), 5)
    (transfer,) = tiers.kv.transfers()
    assert (transfer.source, transfer.destination) == (Tier.DEVICE, Tier.HOST)
    assert [source for source, _ in transfer.pairs] == seq.tables[0][:1]
    tiers.kv.computed(seq, range(10), 8)
    (second,) = tiers.kv.transfers()
    assert [source for source, _ in second.pairs] == seq.tables[0][1:2]
    assert tiers.kv.transfers() == []
    assert second.id != transfer.id
    assert second.pairs[0][1] != transfer.pairs[0][1]
    assert tiers.kv.transfers_open == 2


def test_what_was_evicted_comes_back_from_the_host() -> None:
    tiers = Tiers()
    tiers.serve(range(12))
    assert tiers.hit(range(13)) == (12, 0)
    tiers.evict()
    assert tiers.hit(range(13)) == (12, 12)
    seq = tiers.admit(range(13))
    assert not tiers.kv.loaded(seq)
    (transfer,) = tiers.kv.transfers()
    assert (transfer.source, transfer.destination) == (Tier.HOST, Tier.DEVICE)
    assert [destination for _, destination in transfer.pairs] == seq.tables[0][:3]
    assert tiers.kv.transfer_done(TransferResult(transfer.id)) == [seq]
    assert tiers.kv.loaded(seq)
    assert seq.loaded_tokens == 12
    assert tiers.host.stats.loaded == 3
    tiers.kv.computed(seq, range(13), 13)
    assert tiers.kv.transfers() == [], "the host has it already"
    tiers.kv.release(seq)
    assert tiers.hit(range(13)) == (12, 0)
    tiers.kv.check()


def test_a_hit_goes_on_from_the_device_to_the_host() -> None:
    tiers = Tiers()
    tiers.serve(range(16))
    keep = tiers.admit(range(9))
    tiers.evict()
    assert tiers.hit(range(17)) == (16, 8)
    seq = tiers.admit(range(17))
    assert seq.tables[0][:2] == keep.tables[0][:2]
    (transfer,) = tiers.kv.transfers()
    assert [destination for _, destination in transfer.pairs] == seq.tables[0][2:4]


def test_what_is_on_its_way_to_the_host_can_not_be_found_there() -> None:
    tiers = Tiers()
    tiers.compute(range(9))
    (transfer,) = tiers.kv.transfers()
    tiers.evict()  # Takes all but what is leased.
    assert tiers.hit(range(9)) == (8, 0)
    assert not tiers.host.contains(0, NAMER.chain(NAMER.root(), range(4))[0])
    tiers.kv.transfer_done(TransferResult(transfer.id))
    tiers.evict()
    assert tiers.hit(range(9)) == (8, 8)


def test_a_source_is_leased_until_it_was_copied() -> None:
    tiers = Tiers()
    tiers.compute(range(9))
    kv = tiers.kv
    assert (kv.num_free, kv.leased_blocks, kv.cached_blocks) == (6, 2, 0)
    (transfer,) = kv.transfers()
    leased = {source for source, _ in transfer.pairs}
    tokens = [1] * 24
    seq = kv.sequence(tokens, "")
    assert kv.admit(seq, kv.match(seq, tokens), 24) is not None
    assert not leased & set(seq.tables[0])
    assert kv.extend(seq, 25) is None
    kv.transfer_done(TransferResult(transfer.id))
    assert (kv.num_free, kv.leased_blocks, kv.cached_blocks) == (2, 0, 2)
    assert kv.extend(seq, 25) is not None
    kv.check()


def test_a_lease_ends_where_the_copy_fails_too() -> None:
    tiers = Tiers()
    tiers.compute(range(9))
    (transfer,) = tiers.kv.transfers()
    tiers.kv.transfer_done(TransferResult(transfer.id, [transfer.pairs[0][1]]))
    assert tiers.kv.leased_blocks == 0
    assert tiers.host.stats.failed == 1
    tiers.kv.check()
    tiers.evict()
    assert tiers.hit(range(9)) == (0, 0), "the second block is of no use without the first"


def test_a_load_that_fails_shortens_what_is_there() -> None:
    tiers = Tiers()
    tiers.serve(range(16))
    tiers.evict()
    seq = tiers.admit(range(17))
    (transfer,) = tiers.kv.transfers()
    assert tiers.kv.transfer_done(TransferResult(transfer.id, [transfer.pairs[2][1]])) == [seq]
    assert seq.loaded_tokens == 8
    assert len(seq.tables[0]) == 2, "what comes behind is computed into other blocks"
    tiers.kv.check()
    assert tiers.kv.extend(seq, 17) is not None
    tiers.kv.computed(seq, range(17), 17)
    tiers.kv.check()
    assert tiers.hit(range(17)) == (16, 0)
    assert tiers.host.stats.failed == 1


def test_a_failed_host_block_is_not_tried_again() -> None:
    tiers = Tiers()
    tiers.serve(range(16))
    tiers.evict()
    seq = tiers.admit(range(17))
    (transfer,) = tiers.kv.transfers()
    tiers.kv.transfer_done(TransferResult(transfer.id, [transfer.pairs[0][1]]))
    assert seq.loaded_tokens == 0
    assert seq.tables == [[]]
    tiers.kv.release(seq)
    tiers.evict()
    assert tiers.hit(range(17)) == (0, 0)


def test_who_gives_up_while_loading_leaves_the_blocks_to_the_copy() -> None:
    tiers = Tiers()
    tiers.serve(range(12))
    tiers.evict()
    seq = tiers.admit(range(13))
    tiers.kv.release(seq)
    tiers.kv.check()
    assert tiers.kv.leased_blocks == 3
    (transfer,) = tiers.kv.transfers()
    assert tiers.kv.transfer_done(TransferResult(transfer.id)) == [], "nobody waits any more"
    assert tiers.kv.leased_blocks == 0
    assert tiers.hit(range(13)) == (12, 0), "what was loaded is there all the same"
    tiers.kv.check()


def test_two_that_load_the_same_have_each_their_own_copy() -> None:
    tiers = Tiers()
    tiers.serve(range(8))
    tiers.evict()
    first, second = tiers.admit(range(9)), tiers.admit(range(9))
    assert not set(first.tables[0]) & set(second.tables[0])
    one, two = tiers.kv.transfers()
    assert tiers.kv.transfer_done(TransferResult(two.id)) == [second]
    assert not tiers.kv.loaded(first)
    assert tiers.kv.transfer_done(TransferResult(one.id)) == [first]
    tiers.kv.check()


def test_a_host_block_that_is_read_does_not_go() -> None:
    tiers = Tiers(host_blocks=2)
    tiers.serve(range(8))
    tiers.evict()
    seq = tiers.admit(range(9))
    tiers.compute(range(100, 104))
    assert tiers.host.stats.skipped == 1
    (load,) = tiers.kv.transfers()
    tiers.kv.transfer_done(TransferResult(load.id))
    assert seq.loaded_tokens == 8
    tiers.serve(range(200, 204))
    assert tiers.host.stats.evicted == 1
    tiers.kv.check()


def test_the_host_gives_up_tails_first_and_what_was_used_longest_ago() -> None:
    tiers = Tiers(num_blocks=20, host_blocks=6)
    tiers.serve(range(12))
    tiers.serve(range(100, 112))
    tiers.serve(range(13))
    tiers.serve(range(200, 208))
    tiers.evict()
    assert tiers.hit(range(13)) == (12, 12)
    assert tiers.hit(range(100, 112)) == (4, 4)


def test_prompts_computed_in_chunks_lose_their_tail_first_too() -> None:
    tiers = Tiers(num_blocks=20, host_blocks=4)
    seq = tiers.admit(range(16))
    for end in (8, 16):
        tiers.kv.computed(seq, range(16), end)
        tiers.copy()
    tiers.kv.release(seq)
    tiers.serve(range(100, 104))
    tiers.evict()
    assert tiers.hit(range(17)) == (12, 12)


def test_salts_isolate_on_the_host() -> None:
    tiers = Tiers()
    tiers.serve(range(8), "acme")
    tiers.evict()
    assert tiers.hit(range(9), "acme") == (8, 8)
    assert tiers.hit(range(9)) == (0, 0)


def test_resetting_empties_the_host_and_what_was_under_way() -> None:
    tiers = Tiers()
    tiers.serve(range(8))
    tiers.compute(range(100, 108))
    (store,) = tiers.kv.transfers()
    tiers.kv.events()
    assert tiers.kv.reset()
    assert tiers.kv.events() == [CacheCleared()]
    tiers.kv.transfer_done(TransferResult(store.id))
    tiers.evict()
    assert tiers.hit(range(9)) == (0, 0)
    assert tiers.hit(range(100, 109)) == (0, 0)
    assert tiers.kv.events() == []
    assert tiers.host.num_held == 0
    tiers.kv.check()


def test_what_was_loaded_for_nobody_is_not_found_after_a_reset() -> None:
    tiers = Tiers()
    tiers.serve(range(8))
    tiers.evict()
    tiers.kv.release(tiers.admit(range(9)))
    assert tiers.kv.reset()
    tiers.copy()
    assert tiers.hit(range(9)) == (0, 0)
    assert tiers.kv.num_free == tiers.kv.capacity


def test_events_name_the_tier() -> None:
    tiers = Tiers(num_blocks=3, host_blocks=2)
    names = NAMER.chain(NAMER.root(), range(8))
    tiers.serve(range(8))
    tiers.evict()
    assert tiers.kv.events() == [
        BlockStored(names, None, 4, list(range(8)), "device"),
        BlockStored(names, None, 4, list(range(8)), "host"),
        BlockRemoved(names[::-1], "device"),
    ]
    seq = tiers.admit([*range(4), 77])
    tiers.copy()
    assert tiers.kv.events() == [BlockStored(names[:1], None, 4, list(range(4)), "device")]
    tiers.kv.release(seq)
    tiers.serve(range(100, 104))
    others = NAMER.chain(NAMER.root(), range(100, 104))
    assert tiers.kv.events() == [
        BlockStored(others, None, 4, list(range(100, 104)), "device"),
        BlockRemoved(names[1:], "host"),
        BlockStored(others, None, 4, list(range(100, 104)), "host"),
    ]


def test_events_of_salted_blocks_tell_no_tokens_on_the_host_either() -> None:
    tiers = Tiers()
    tiers.serve(range(8), "acme")
    tiers.evict()
    tiers.admit(range(9), "acme")
    tiers.copy()
    stored = [event for event in tiers.kv.events() if isinstance(event, BlockStored)]
    assert [event.tier for event in stored] == ["device", "host", "device"]
    assert all(event.token_ids is None for event in stored)


def test_a_windowed_group_loads_only_what_its_window_needs() -> None:
    tiers = Tiers(num_blocks=21, groups=(CacheGroup(), CacheGroup(window=6)))
    tiers.serve(range(20))
    tiers.evict()
    assert tiers.hit(range(21)) == (20, 20)
    seq = tiers.admit(range(21))
    (load,) = tiers.kv.transfers()
    assert len(load.pairs) == 5 + 2
    # Without the last block of the window, no shorter hit has its own window: all is computed anew.
    tiers.kv.transfer_done(TransferResult(load.id, [seq.tables[1][4]]))
    assert seq.loaded_tokens == 0
    assert seq.tables == [[], []]
    tiers.kv.check()
    for end in (10, 21):
        assert tiers.kv.extend(seq, end) is not None
        tiers.kv.computed(seq, range(21), end)
    tiers.kv.release(seq)
    assert tiers.hit(range(21)) == (20, 0)
    tiers.kv.check()


def test_a_sequence_does_not_run_before_it_is_loaded() -> None:
    tiers = Tiers()
    tiers.serve(range(8))
    tiers.evict()
    seq = tiers.admit(range(12))
    with pytest.raises(RuntimeError, match="can't have 12 tokens computed"):
        tiers.kv.computed(seq, range(12), 12)


def test_a_result_for_no_transfer_is_refused() -> None:
    tiers = Tiers()
    with pytest.raises(RuntimeError, match="transfer 3 is not under way"):
        tiers.kv.transfer_done(TransferResult(3))
    tiers.compute(range(8))
    (store,) = tiers.kv.transfers()
    tiers.kv.transfer_done(TransferResult(store.id))
    with pytest.raises(RuntimeError, match="not under way"):
        tiers.kv.transfer_done(TransferResult(store.id))


def test_a_host_tier_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        HostTier(0)


def test_one_content_is_copied_once() -> None:
    host = HostTier(4)
    assert host.store(0, [b"a", b"b"], [1, 2], None, None) == [1, 2]
    assert host.store(0, [b"b", b"c"], [3, 4], b"a", None) == [4], "one is on its way already"
    (transfer,) = host.transfers()
    host.done(TransferResult(transfer.id))
    assert host.store(0, [b"a"], [5], None, None) == []
    assert host.store(1, [b"a"], [5], None, None) == [5], "another group's block is another content"
    assert host.num_held == 3
    host.check()
