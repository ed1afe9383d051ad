"""Prefix caching with one full cache group: what is found, who holds it, what goes first, what is told."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from worker.engine.kv_cache import IntegrityError, KVCache, SequenceBlocks
from worker.engine.kv_connector import HostTier
from worker.engine.plan import CacheGroup
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared

NAMER = BlockNamer("model", 4)


def cache(num_blocks: int = 11, **options: bool) -> KVCache:
    """Blocks of 4 tokens."""
    return KVCache(num_blocks, 4, namer=NAMER, **options)


def admit(kv: KVCache, token_ids: Sequence[int], salt: str = "") -> SequenceBlocks:
    seq = kv.sequence(token_ids, salt)
    assert kv.admit(seq, kv.match(seq, token_ids), len(token_ids)) is not None
    return seq


def serve(kv: KVCache, token_ids: Sequence[int], salt: str = "") -> list[int]:
    """Compute all of a sequence and let go of it; the blocks it had."""
    seq = admit(kv, token_ids, salt)
    blocks = seq.tables[0].copy()
    kv.computed(seq, token_ids, len(token_ids))
    kv.release(seq)
    kv.check()
    return blocks


def hit(kv: KVCache, token_ids: Sequence[int], salt: str = "", *, read_cache: bool = True) -> int:
    return kv.match(kv.sequence(token_ids, salt), token_ids, read_cache=read_cache).tokens


def test_a_second_sequence_shares_the_full_blocks_of_the_first() -> None:
    kv = cache()
    first = admit(kv, range(10))
    kv.computed(first, range(10), 10)
    assert first.tables == [[1, 2, 3]]
    tokens = [*range(9), 77, 78]
    second = admit(kv, tokens)
    assert second.tables == [[1, 2, 4]]
    assert second.loaded_tokens == 8
    assert kv.num_free == 6
    kv.release(first)
    assert kv.num_free == 7, "only the block that nobody shares is free"
    kv.check()
    kv.release(second)
    assert kv.num_free == 10
    kv.check()


def test_what_was_released_is_found_and_held_again() -> None:
    kv = cache()
    blocks = serve(kv, range(10))
    assert (kv.num_free, kv.cached_blocks) == (10, 2)
    assert kv.usage == 0.0
    again = admit(kv, range(10))
    assert again.tables[0][:2] == blocks[:2]
    assert (kv.num_free, kv.cached_blocks) == (7, 0)
    assert kv.usage == pytest.approx(0.3)


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8), (12, 8), (30, 12)])
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(length: int, found: int) -> None:
    kv = cache()
    serve(kv, range(12))
    assert hit(kv, range(length)) == found


def test_a_hit_ends_at_the_first_token_that_differs() -> None:
    kv = cache()
    serve(kv, range(12))
    for position in range(12):
        tokens = list(range(13))
        tokens[position] = 99
        assert hit(kv, tokens) == position // 4 * 4


def test_a_part_of_a_block_is_never_named() -> None:
    kv = cache(record_events=True)
    seq = admit(kv, range(10))
    named = []
    for computed in range(1, 11):
        kv.computed(seq, range(10), computed)
        named += [len(event.names) for event in kv.events() if isinstance(event, BlockStored)]
        assert sum(named) == computed // 4


def test_only_what_a_step_has_computed_can_be_found() -> None:
    kv = cache()
    seq = admit(kv, range(20))
    assert hit(kv, range(20)) == 0
    kv.computed(seq, range(20), 7)
    assert hit(kv, range(20)) == 4
    kv.computed(seq, range(20), 20)
    assert hit(kv, range(20)) == 16


def test_generated_tokens_are_named_as_well_as_prompts() -> None:
    kv = cache()
    tokens = list(range(6))
    seq = admit(kv, tokens)
    for _ in range(6):
        kv.computed(seq, tokens, len(tokens))
        tokens.append(50 + len(tokens))
        assert kv.extend(seq, len(tokens)) is not None
    kv.release(seq)
    assert hit(kv, tokens) == 8
    assert hit(kv, [*tokens[:6], 0, 0, 0, 0]) == 4


def test_salts_isolate_and_their_absence_shares() -> None:
    kv = cache(30)
    serve(kv, range(12))
    serve(kv, range(12), "acme")
    assert kv.cached_blocks == 6
    assert hit(kv, range(12)) == 8
    assert hit(kv, range(12), "acme") == 8
    assert hit(kv, range(12), "globex") == 0


def test_nothing_is_read_where_the_caller_says_so_but_it_can_be_found_later() -> None:
    kv = cache()
    seq = kv.sequence(range(9), "")
    match = kv.match(seq, range(9), read_cache=False)
    assert match.tokens == 0
    assert kv.admit(seq, match, 9) is not None
    kv.computed(seq, range(9), 9)
    assert hit(kv, range(9)) == 8
    assert hit(kv, range(9), read_cache=False) == 0


def test_without_a_namer_nothing_is_cached() -> None:
    kv = KVCache(11, 4)
    serve(kv, range(12))
    assert hit(kv, range(12)) == 0
    assert kv.cached_blocks == 0


def test_the_tail_goes_before_the_beginning() -> None:
    kv = cache(7)
    serve(kv, range(24))
    admit(kv, [90, 91])
    assert hit(kv, range(30)) == 20
    admit(kv, [92, 93, 94, 95, 96])
    assert hit(kv, range(30)) == 12


def test_what_was_used_longest_ago_goes_first() -> None:
    kv = cache(7)
    serve(kv, range(12))
    serve(kv, range(100, 112))
    serve(kv, range(13))  # The first again: now the second is the older.
    admit(kv, range(200, 212))
    assert hit(kv, range(13)) == 12
    assert hit(kv, range(100, 112)) == 0


def test_what_is_matched_does_not_go_for_the_same_sequence() -> None:
    kv = cache(7)
    serve(kv, range(8))
    serve(kv, range(100, 116))
    tokens = [*range(8), *range(50, 66)]
    seq = admit(kv, tokens)
    assert len(set(seq.tables[0])) == 6
    kv.check()
    assert hit(kv, range(9)) == 8


def test_a_sequence_is_admitted_whole_or_not_at_all() -> None:
    kv = cache(7)
    serve(kv, range(8))
    holder = admit(kv, range(100, 112))
    tokens = [*range(8), *range(50, 56)]
    seq = kv.sequence(tokens, "")
    match = kv.match(seq, tokens)
    assert match.tokens == 8
    # Three are free, the two of the match among them; four are needed.
    assert kv.num_free == 3
    assert kv.admit(seq, match, 14) is None
    assert seq.tables == [[]]
    assert (kv.num_free, kv.cached_blocks) == (3, 2)
    kv.check()
    kv.release(holder)
    assert kv.admit(seq, match, 14) is not None
    kv.check()


def test_admission_leaves_the_reserve_free() -> None:
    kv = cache(7)
    seq = kv.sequence(range(12), "")
    match = kv.match(seq, range(12))
    assert kv.admit(seq, match, 12, reserve=4) is None
    assert kv.admit(seq, match, 12, reserve=3) == [[1, 2, 3]]


def test_a_sequence_grows_by_what_is_missing_or_not_at_all() -> None:
    kv = cache(5)
    seq = admit(kv, range(5))
    assert kv.extend(seq, 8) == []
    assert kv.extend(seq, 9) == [[3]]
    assert kv.extend(seq, 17) is None
    assert kv.extend(seq, 16) == [[4]]
    assert seq.tables == [[1, 2, 3, 4]]
    assert kv.num_free == 0
    kv.check()


def test_growing_takes_what_is_cached() -> None:
    kv = cache(5)
    serve(kv, range(8))
    seq = admit(kv, range(100, 108))
    assert kv.extend(seq, 16) is not None
    assert hit(kv, range(9)) == 0
    assert kv.cached_blocks == 0


def test_the_same_content_computed_twice_is_found_once() -> None:
    kv = cache(record_events=True)
    first, second = admit(kv, range(9)), admit(kv, range(9))
    assert not set(first.tables[0]) & set(second.tables[0])
    kv.computed(second, range(9), 9)
    kv.computed(first, range(9), 9)
    (stored,) = kv.events()
    assert isinstance(stored, BlockStored)
    assert len(stored.names) == 2
    assert admit(kv, range(9)).tables[0][:2] == second.tables[0][:2]
    kv.check()
    kv.release(first)
    assert kv.cached_blocks == 0, "the copy without a name is free and no more"


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    kv = cache()
    tokens = list(range(10))
    seq = admit(kv, tokens)
    kv.computed(seq, tokens, 10)
    tokens.append(10)
    kv.release(seq)
    assert seq.tables == [[]]
    match = kv.match(seq, tokens)
    assert match.tokens == 8
    assert kv.admit(seq, match, len(tokens)) is not None
    kv.computed(seq, tokens, 11)
    kv.release(seq)
    kv.check()


def test_releasing_what_holds_nothing_does_nothing() -> None:
    kv = cache()
    seq = kv.sequence(range(5), "")
    kv.release(seq)
    assert kv.num_free == kv.capacity == 10


def test_resetting_forgets_what_nobody_holds() -> None:
    kv = cache(record_events=True)
    serve(kv, range(100, 112))
    seq = admit(kv, range(8))
    kv.computed(seq, range(8), 8)
    kv.events()
    assert not kv.reset()
    (removed,) = kv.events()
    assert isinstance(removed, BlockRemoved)
    assert len(removed.names) == 3
    assert hit(kv, range(100, 112)) == 0
    assert hit(kv, range(9)) == 8
    kv.release(seq)
    assert kv.reset()
    assert kv.events() == [CacheCleared()]
    assert hit(kv, range(9)) == 0
    assert kv.cached_blocks == 0
    kv.check()


def test_events_tell_what_comes_and_goes_in_order() -> None:
    kv = cache(4, record_events=True)
    names = NAMER.chain(NAMER.root(), range(8))
    serve(kv, range(9))
    assert kv.events() == [BlockStored(names, None, 4, list(range(8)))]
    assert kv.events() == []
    tokens = [*range(4), *range(50, 58)]
    seq = admit(kv, tokens)
    kv.computed(seq, tokens, 12)
    others = NAMER.chain(NAMER.root(), tokens)
    assert kv.events() == [
        BlockRemoved([names[1]]),
        BlockStored(others[1:], names[0], 4, tokens[4:]),
    ]


def test_events_of_salted_blocks_tell_no_tokens() -> None:
    kv = cache(record_events=True)
    serve(kv, range(9), "acme")
    assert kv.events() == [BlockStored(NAMER.chain(NAMER.root("acme"), range(8)), None, 4, None)]


def test_a_match_that_is_out_of_date_is_refused() -> None:
    kv = cache(5)
    serve(kv, range(8))
    seq = kv.sequence(range(9), "")
    match = kv.match(seq, range(9))
    admit(kv, range(100, 112))
    with pytest.raises(RuntimeError, match="may be gone"):
        kv.admit(seq, match, 9)


def test_a_sequence_is_neither_admitted_twice_nor_run_without_blocks() -> None:
    kv = cache()
    seq = kv.sequence(range(8), "")
    with pytest.raises(RuntimeError, match="not admitted"):
        kv.extend(seq, 1)
    match = kv.match(seq, range(8))
    assert kv.admit(seq, match, 8) is not None
    with pytest.raises(RuntimeError, match="admitted already"):
        kv.admit(seq, match, 8)
    with pytest.raises(RuntimeError, match="can't have 9 tokens computed"):
        kv.computed(seq, range(20), 9)


def test_the_check_sees_a_table_that_was_tampered_with() -> None:
    kv = cache()
    seq = admit(kv, range(8))
    kv.check()
    seq.tables[0].pop()
    with pytest.raises(IntegrityError, match="counts 1 holders and has 0"):
        kv.check()


def test_a_long_prompt_is_found_whole() -> None:
    rng = random.Random(5)
    kv = KVCache(4200, 16, namer=BlockNamer("model", 16))
    tokens = [rng.randrange(50_000) for _ in range(32_768)]
    first = serve(kv, tokens)
    assert first == list(range(1, 2049))
    seq = admit(kv, tokens)
    assert seq.loaded_tokens == 32_752
    assert seq.tables[0][:2047] == first[:2047]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one cache group"):
        KVCache(4, 4, [])
    with pytest.raises(ValueError, match="blocks have 4 tokens, the cache's 8"):
        KVCache(4, 8, namer=NAMER)
    with pytest.raises(ValueError, match="without a namer there are none"):
        KVCache(4, 4, connector=HostTier(4))
    with pytest.raises(ValueError, match="not a multiple of the block size"):
        KVCache(4, 4, [CacheGroup(window=8, sinks=3)])
    with pytest.raises(ValueError, match="attends to itself"):
        KVCache(4, 4, [CacheGroup(window=0)])


def test_the_pool_bounds_a_sequence() -> None:
    kv = cache(11)
    assert kv.max_sequence_tokens == 40
    assert kv.max_sequence_tokens < sys.maxsize
    admit(kv, range(40))
    assert kv.num_free == 0
