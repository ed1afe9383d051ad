"""The pool: who holds a block, in which order free ones go, and what can be found."""

from collections import Counter

import pytest

from worker.engine.block_pool import BlockPool, IntegrityError
from worker.engine.plan import NULL_BLOCK


def held(pool: BlockPool, names: list[bytes]) -> list[int]:
    """As many blocks as ``names``, held and named."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.name(block, 0, name)
    return blocks


def test_hands_out_every_block_but_the_null_block_once() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(7)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0
    assert pool.usage == 1.0
    with pytest.raises(RuntimeError, match="1 KV blocks asked for, 0 free"):
        pool.allocate(1)


def test_an_allocation_that_fails_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(RuntimeError):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.check({}, {})


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert pool.num_free == 2
    pool.check({blocks[0]: 1}, {})
    pool.free(blocks[:1])
    assert pool.num_free == 3
    assert pool.usage == 0.0


def test_refuses_to_free_share_or_lease_a_free_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(blocks)
    with pytest.raises(RuntimeError, match="cannot be leased"):
        pool.lease(blocks)
    with pytest.raises(RuntimeError, match="not leased"):
        pool.end_lease(blocks)


def test_ids_ascend_in_what_is_handed_out_together() -> None:
    pool = BlockPool(12)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(3) == [5, 6, 7]
    pool.free([1, 2, 3, 4])
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([2, 4])
    pool.free([6])
    assert pool.allocate(3) == [2, 4, 6]


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(6)
    cached = held(pool, [b"a", b"b"])
    blank = pool.allocate(2)
    pool.free(blank)
    pool.free(cached)
    assert pool.num_cached == 2
    pool.allocate(3)
    assert pool.num_cached == 2
    pool.allocate(1)
    assert pool.num_cached == 1


def test_cached_blocks_go_in_the_order_in_which_they_were_freed_and_tails_first() -> None:
    pool = BlockPool(6)
    first = held(pool, [b"a0", b"a1", b"a2"])
    second = held(pool, [b"b0", b"b1"])
    pool.free(second)
    pool.free(first)
    gone = []
    for _ in range(5):
        before = set(pool.by_name[0])
        pool.allocate(1)
        gone += before - set(pool.by_name[0])
    assert gone == [b"b1", b"b0", b"a2", b"a1", b"a0"]


def test_a_freed_block_can_be_found_until_it_is_handed_out() -> None:
    pool = BlockPool(3)
    blocks = held(pool, [b"a", b"b"])
    pool.free(blocks)
    assert pool.by_name[0] == {b"a": blocks[0], b"b": blocks[1]}
    assert pool.removals == 0
    taken = pool.allocate(1)
    assert pool.by_name[0] == {b"a": blocks[0]}
    assert pool.removals == 1
    pool.check(Counter(taken), {})


def test_a_block_that_is_held_again_does_not_go() -> None:
    pool = BlockPool(4)
    blocks = held(pool, [b"a", b"b"])
    pool.free(blocks)
    pool.share([blocks[1]])
    assert pool.num_free == 2
    taken = pool.allocate(2)
    assert blocks[1] not in taken
    assert pool.by_name[0] == {b"b": blocks[1]}


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    assert pool.name(one, 0, b"a")
    assert not pool.name(two, 0, b"a")
    pool.free([one, two])
    assert pool.num_cached == 1
    assert pool.by_name[0] == {b"a": one}
    pool.check({}, {})


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(4, num_groups=2)
    one, two = pool.allocate(2)
    assert pool.name(one, 0, b"a")
    assert pool.name(two, 1, b"a")
    assert pool.by_name == [{b"a": one}, {b"a": two}]


def test_only_a_held_block_without_a_name_gets_one() -> None:
    pool = BlockPool(4)
    (block,) = held(pool, [b"a"])
    with pytest.raises(RuntimeError, match="can't be given one"):
        pool.name(block, 0, b"b")
    with pytest.raises(RuntimeError, match="can't be given one"):
        pool.name(block + 1, 0, b"b")


def test_a_leased_block_is_not_free_before_the_lease_ends() -> None:
    pool = BlockPool(4)
    blocks = held(pool, [b"a"]) + pool.allocate(1)
    pool.lease(blocks)
    pool.lease(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.num_leased) == (1, 2)
    pool.check({}, {blocks[0]: 2, blocks[1]: 1})
    pool.end_lease(blocks)
    assert (pool.num_free, pool.num_leased, pool.num_cached) == (2, 1, 0)
    pool.end_lease(blocks[:1])
    assert (pool.num_free, pool.num_leased, pool.num_cached) == (3, 0, 1)


def test_a_leased_block_can_be_held_again() -> None:
    pool = BlockPool(4)
    blocks = held(pool, [b"a"])
    pool.lease(blocks)
    pool.free(blocks)
    pool.share(blocks)
    assert pool.num_leased == 0
    pool.end_lease(blocks)
    pool.check(Counter(blocks), {})


def test_forgetting_leaves_what_is_held() -> None:
    pool = BlockPool(8)
    kept, dropped, leased = held(pool, [b"a"]), held(pool, [b"b", b"c"]), held(pool, [b"d"])
    pool.lease(leased)
    pool.free(dropped + leased)
    assert not pool.forget_unused()
    assert pool.by_name[0] == {b"a": kept[0]}
    assert (pool.num_cached, pool.num_free) == (0, 5)
    pool.check(Counter(kept), Counter(leased))
    pool.end_lease(leased)
    pool.free(kept)
    assert pool.forget_unused()
    pool.check({}, {})


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="none to give"):
        BlockPool(1)


def test_the_check_sees_a_leak_a_stray_holder_and_a_stray_lease() -> None:
    pool = BlockPool(4)
    (block,) = held(pool, [b"a"])
    pool.check({block: 1}, {})
    with pytest.raises(IntegrityError, match="counts 1 holders and has 0"):
        pool.check({}, {})
    with pytest.raises(IntegrityError, match="counts 0 leases and has 1"):
        pool.check({block: 1}, {block: 1})
    del pool.by_name[0][b"a"]
    with pytest.raises(IntegrityError, match="by which it isn't found"):
        pool.check({block: 1}, {})
