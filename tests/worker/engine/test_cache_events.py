"""Events that say the same of one chain are one; nothing else is joined."""

from worker.engine.cache_events import CacheEvents
from worker.engine.plan import Tier
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared


def test_blocks_that_follow_one_another_are_one_event() -> None:
    events = CacheEvents(2)
    events.stored(Tier.DEVICE, 0, [b"a"], None, (1, 2))
    events.stored(Tier.DEVICE, 0, [b"b", b"c"], b"a", (3, 4, 5, 6))
    assert events.drain() == [BlockStored([b"a", b"b", b"c"], None, 2, [1, 2, 3, 4, 5, 6])]
    assert events.drain() == []


def test_what_does_not_follow_is_an_event_of_its_own() -> None:
    events = CacheEvents(1)
    events.stored(Tier.DEVICE, 0, [b"a"], None, [1])
    events.stored(Tier.DEVICE, 0, [b"b"], None, [2])
    events.stored(Tier.HOST, 0, [b"c"], b"b", [3])
    events.stored(Tier.HOST, 1, [b"d"], b"c", [4])
    events.stored(Tier.HOST, 1, [b"e"], b"d", None)
    events.stored(Tier.HOST, 1, [b"f"], b"e", None)
    assert events.drain() == [
        BlockStored([b"a"], None, 1, [1]),
        BlockStored([b"b"], None, 1, [2]),
        BlockStored([b"c"], b"b", 1, [3], "host"),
        BlockStored([b"d"], b"c", 1, [4], "host", 1),
        BlockStored([b"e", b"f"], b"d", 1, None, "host", 1),
    ]


def test_removals_of_one_tier_and_group_in_a_row_are_one_event() -> None:
    events = CacheEvents(1)
    for tier, group, name in [(0, 0, b"a"), (0, 0, b"b"), (0, 1, b"c"), (1, 1, b"d"), (1, 1, b"e")]:
        events.removed(Tier(tier), group, name)
    assert events.drain() == [
        BlockRemoved([b"a", b"b"]),
        BlockRemoved([b"c"], group=1),
        BlockRemoved([b"d", b"e"], "host", 1),
    ]


def test_what_was_drained_is_not_changed_any_more() -> None:
    events = CacheEvents(1)
    events.stored(Tier.DEVICE, 0, [b"a"], None, [1])
    drained = events.drain()
    events.stored(Tier.DEVICE, 0, [b"b"], b"a", [2])
    assert drained == [BlockStored([b"a"], None, 1, [1])]
    assert events.drain() == [BlockStored([b"b"], b"a", 1, [2])]


def test_a_tokens_list_of_the_caller_is_not_taken_over() -> None:
    events = CacheEvents(1)
    tokens = [1]
    events.stored(Tier.DEVICE, 0, [b"a"], None, tokens)
    events.stored(Tier.DEVICE, 0, [b"b"], b"a", [2])
    assert tokens == [1]


def test_clearing_makes_what_came_before_needless() -> None:
    events = CacheEvents(1)
    events.stored(Tier.DEVICE, 0, [b"a"], None, [1])
    events.removed(Tier.DEVICE, 0, b"a")
    events.cleared()
    events.stored(Tier.DEVICE, 0, [b"b"], None, [2])
    assert events.drain() == [CacheCleared(), BlockStored([b"b"], None, 1, [2])]
