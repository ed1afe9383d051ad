import pytest

from worker.engine.kv_cache import BlockPool
from worker.engine.plan import NULL_BLOCK


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


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert pool.num_free == 2
    pool.free(blocks[:1])
    assert pool.num_free == 3
    assert pool.usage == 0.0


def test_refuses_to_free_or_share_a_free_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(blocks)


def test_reuses_what_was_freed_first_and_a_sequence_from_its_tail() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5) == [*reversed(second), *reversed(first)]


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="none to give"):
        BlockPool(1)
