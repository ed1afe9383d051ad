"""What a window needs, by counting tokens one by one."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.engine.cache_groups import CacheGroups, GroupBlocks
from worker.engine.plan import CacheGroup

windows = st.none() | st.integers(1, 20)
block_sizes = st.sampled_from([1, 2, 4])


def needed(group: CacheGroup, block_size: int, num_tokens: int) -> set[int]:
    """Blocks that hold something the token after ``num_tokens`` tokens attends to."""
    seen = (
        position
        for position in range(num_tokens)
        if group.window is None or position > num_tokens - group.window or position < group.sinks
    )
    return {position // block_size for position in seen}


@given(window=windows, block_size=block_sizes, sinks=st.integers(0, 2), num_blocks=st.integers(0, 12))
def test_what_is_needed_is_what_is_seen(window: int | None, block_size: int, sinks: int, num_blocks: int) -> None:
    group = CacheGroup(window, sinks * block_size)
    blocks = GroupBlocks(group, block_size, None)
    kept = blocks.first_needed(num_blocks * block_size)
    found = {position for position in range(num_blocks) if position >= kept or position < blocks.sinks}
    assert found == needed(group, block_size, num_blocks * block_size)


@given(window=st.integers(1, 20), block_size=block_sizes, first=st.integers(0, 6))
def test_a_block_is_left_behind_no_sooner_and_no_later(window: int, block_size: int, first: int) -> None:
    blocks = GroupBlocks(CacheGroup(window), block_size, None)
    leaves = blocks.next_left_behind(first)
    assert blocks.first_needed(leaves) == first + 1
    assert blocks.first_needed(leaves - 1) == first


@given(
    specs=st.lists(st.tuples(windows, st.integers(0, 2)), min_size=1, max_size=3),
    block_size=block_sizes,
    limit=st.integers(0, 12),
    data=st.data(),
)
def test_the_longest_hit_is_the_longest_that_all_groups_can_serve(
    specs: list[tuple[int | None, int]], block_size: int, limit: int, data: st.DataObject
) -> None:
    described = [CacheGroup(window, sinks * block_size) for window, sinks in specs]
    missing = [data.draw(st.sets(st.integers(0, 11), max_size=4)) for _ in described]
    groups = CacheGroups(described, block_size, None)
    found = groups.longest_hit(lambda index: lambda position: position not in missing[index], limit)
    serves = [
        hit
        for hit in range(limit + 1)
        if not any(
            needed(group, block_size, hit * block_size) & gone for group, gone in zip(described, missing, strict=True)
        )
    ]
    assert found == max(serves)


@pytest.mark.parametrize("missing", [[{2}, {3, 4}], [{3, 4}, {2}]])
def test_a_group_is_asked_again_when_another_wants_less(missing: list[set[int]]) -> None:
    """One group could serve 5 blocks, the other 3 at most: there the first lacks what it needs, so both settle on 2."""
    groups = CacheGroups([CacheGroup(window=4), CacheGroup(window=4)], 4, None)
    assert groups.longest_hit(lambda index: lambda position: position not in missing[index], 5) == 2


@given(window=st.integers(1, 20), block_size=block_sizes, step=st.integers(1, 9), sinks=st.integers(0, 2))
@example(window=1, block_size=4, step=1, sinks=0)
def test_a_window_and_a_step_touch_no_more_blocks_than_are_counted(
    window: int, block_size: int, step: int, sinks: int
) -> None:
    group = CacheGroup(window, sinks * block_size)
    blocks = GroupBlocks(group, block_size, step)
    touched = [
        len(needed(group, block_size, done) | {p // block_size for p in range(done, done + step)}) for done in range(80)
    ]
    assert max(touched) <= blocks.most <= max(touched) + 1


def test_without_windows_nothing_is_left_behind() -> None:
    groups = CacheGroups([CacheGroup(), CacheGroup()], 4, 8)
    assert groups.next_left_behind([0, 0]) == sys.maxsize
    assert groups.first_kept(1000) == [0, 0]
    assert groups.max_sequence_tokens(11) == 20


def test_windows_alone_hold_a_sequence_of_any_length_if_they_hold_any() -> None:
    groups = CacheGroups([CacheGroup(8)], 4, 8)
    assert groups.all[0].most == 5
    assert groups.max_sequence_tokens(5) == sys.maxsize
    assert groups.max_sequence_tokens(4) == 16
