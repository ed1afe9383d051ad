"""Cache groups with windows: what leaves, what a hit needs, what all groups agree on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from worker.engine.kv_cache import KVCache, SequenceBlocks
from worker.engine.plan import NULL_BLOCK, CacheGroup
from worker.protocol.block_names import BlockNamer

FULL = CacheGroup()


def cache(*groups: CacheGroup, num_blocks: int = 40, max_step_tokens: int | None = None) -> KVCache:
    """Blocks of 4 tokens."""
    return KVCache(num_blocks, 4, groups, namer=BlockNamer("model", 4), max_step_tokens=max_step_tokens)


def admit(kv: KVCache, token_ids: Sequence[int]) -> SequenceBlocks:
    seq = kv.sequence(token_ids, "")
    assert kv.admit(seq, kv.match(seq, token_ids), len(token_ids)) is not None
    return seq


def serve(kv: KVCache, token_ids: Sequence[int], chunk: int = 1000) -> None:
    seq = admit(kv, token_ids)
    for end in [*range(seq.loaded_tokens + chunk, len(token_ids), chunk), len(token_ids)]:
        assert kv.extend(seq, end) is not None
        kv.computed(seq, token_ids, end)
    kv.release(seq)
    kv.check()


def hit(kv: KVCache, token_ids: Sequence[int]) -> int:
    return kv.match(kv.sequence(token_ids, ""), token_ids).tokens


def left(seq: SequenceBlocks, group: int = 0) -> list[int]:
    """Positions that were left behind."""
    return [position for position, block in enumerate(seq.tables[group]) if block == NULL_BLOCK]


def test_blocks_that_leave_the_window_are_let_go() -> None:
    kv = cache(CacheGroup(window=6))
    seq = admit(kv, range(24))
    assert kv.num_free == 33
    # After 9 tokens the next sees tokens 4 and later: the first block is out of sight.
    kv.computed(seq, range(24), 8)
    assert left(seq) == []
    kv.computed(seq, range(24), 9)
    assert left(seq) == [0]
    kv.computed(seq, range(24), 13)
    assert left(seq) == [0, 1]
    kv.computed(seq, range(24), 24)
    assert left(seq) == [0, 1, 2, 3]
    assert len(seq.tables[0]) == 6, "positions stay what they are"
    assert kv.num_free == 37
    kv.check()
    kv.release(seq)
    kv.check()


def test_a_window_of_one_token_needs_no_block_behind() -> None:
    kv = cache(CacheGroup(window=1))
    seq = admit(kv, range(9))
    kv.computed(seq, range(9), 8)
    assert left(seq) == [0, 1]


def test_full_groups_keep_what_windows_leave() -> None:
    kv = cache(FULL, CacheGroup(window=4))
    seq = admit(kv, range(16))
    kv.computed(seq, range(16), 16)
    assert left(seq, 0) == []
    assert left(seq, 1) == [0, 1, 2]


def test_sinks_stay() -> None:
    kv = cache(CacheGroup(window=4, sinks=8))
    seq = admit(kv, range(24))
    kv.computed(seq, range(24), 24)
    assert left(seq) == [2, 3, 4]
    kv.check()


def test_windows_leave_without_prefix_caching_too() -> None:
    kv = KVCache(20, 4, [CacheGroup(window=4)])
    seq = admit(kv, range(16))
    kv.computed(seq, range(16), 16)
    assert left(seq) == [0, 1, 2]
    kv.check()


def test_a_hit_needs_only_the_blocks_inside_the_window() -> None:
    kv = cache(CacheGroup(window=6), num_blocks=9)
    serve(kv, range(25))
    # The first blocks were let go first, so they go first.
    other = admit(kv, range(100, 120))
    assert hit(kv, range(25)) == 24
    kv.release(other)
    seq = admit(kv, range(25))
    assert left(seq) == [0, 1, 2, 3]
    assert len(seq.tables[0]) == 7
    kv.check()


def test_a_shorter_hit_must_have_its_own_window() -> None:
    kv = cache(CacheGroup(window=8), num_blocks=8)
    serve(kv, range(25))
    # Two blocks go: what is left are those of positions 2 to 5.
    admit(kv, range(100, 112))
    assert hit(kv, range(25)) == 24
    assert hit(kv, range(17)) == 16
    assert hit(kv, range(13)) == 0, "it needs the blocks of positions 1 and 2"


def test_a_hit_needs_the_sinks_too() -> None:
    kv = cache(CacheGroup(window=4, sinks=4), num_blocks=8)
    serve(kv, range(25))
    assert hit(kv, range(25)) == 24
    holders = [admit(kv, [100 + n]) for n in range(3)]
    assert hit(kv, range(25)) == 24
    for holder in holders:
        kv.release(holder)
    seq = admit(kv, range(25))
    assert seq.tables[0][0] != NULL_BLOCK
    assert left(seq) == [1, 2, 3, 4]


@pytest.mark.parametrize("windows", [(4, 8), (8, 4)])
def test_groups_agree_on_one_length(windows: tuple[int, int]) -> None:
    """Each group alone could serve another length than both together."""
    kv = cache(*(CacheGroup(window=window) for window in windows), num_blocks=40)
    first = admit(kv, range(21))
    kv.computed(first, range(21), 12)
    kv.computed(first, range(21), 20)
    kv.release(first)
    assert hit(kv, range(21)) == 20
    # Of the group with the longer window, only the block at position 3 is taken away.
    long = windows.index(8)
    block = kv._pool.by_name[long][first.names[3]]
    kv._pool._cached.move_to_end(block, last=False)
    kv._pool._blank, spare = [], kv._pool._blank
    admit(kv, [99])
    kv._pool._blank = spare
    # 20 needs positions 3 and 4 there, 16 needs 2 and 3; 12 has its 1 and 2, and the other group its 2.
    assert hit(kv, range(21)) == 12


def test_a_window_holds_no_more_than_it_can_see_in_a_step() -> None:
    kv = cache(CacheGroup(window=8), num_blocks=8, max_step_tokens=8)
    assert kv.max_sequence_tokens == sys.maxsize
    tokens = range(400)
    seq = admit(kv, tokens)
    for end in range(8, 401, 8):
        assert kv.extend(seq, end) is not None, "it has the pool to itself"
        kv.computed(seq, tokens, end)
        kv.check()
    assert len(seq.tables[0]) == 100


def test_without_a_bound_on_steps_admission_gives_all_blocks() -> None:
    kv = cache(CacheGroup(window=8), num_blocks=8)
    assert kv.max_sequence_tokens == 28
    seq = kv.sequence(range(29), "")
    assert kv.admit(seq, kv.match(seq, range(29)), 29) is None


@pytest.mark.parametrize("step", [1, 3, 4, 7, 16])
@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        (FULL, FULL),
        (FULL, CacheGroup(window=9)),
        (CacheGroup(window=5), FULL, CacheGroup(window=16, sinks=4)),
    ],
)
@pytest.mark.parametrize("num_blocks", [20, 33])
def test_the_longest_sequence_fits_by_itself(groups: tuple[CacheGroup, ...], num_blocks: int, step: int) -> None:
    kv = cache(*groups, num_blocks=num_blocks, max_step_tokens=step)
    longest = kv.max_sequence_tokens
    assert 0 < longest < sys.maxsize
    assert runs(kv, range(longest), step)
    assert runs(kv, range(longest), step), "with what the first left in the cache"
    if all(group == FULL for group in groups):
        assert not runs(kv, range(longest + 1), step)
    else:
        assert longest > (num_blocks - 1) // len(groups) * 4 or step == 16, "windows are of some use"


def runs(kv: KVCache, tokens: Sequence[int], step: int) -> bool:
    seq = kv.sequence(tokens, "")
    fits = kv.admit(seq, kv.match(seq, tokens), len(tokens)) is not None
    end = seq.loaded_tokens
    while fits and end < len(tokens):
        end = min(end + step, len(tokens))
        fits = kv.extend(seq, end) is not None
        if fits:
            kv.computed(seq, tokens, end)
    kv.release(seq)
    kv.check()
    return fits
