"""Numbered, replayed, bounded: a follower hears every event once and in order, or is told that some are missing."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from worker.protocol.sse import Event, Framer
from worker.server.kv_event_stream import FellBehind, Follower, KVEventStream

BASE = 1_000


def stream(buffer_bytes: int = 1 << 20) -> KVEventStream:
    return KVEventStream(buffer_bytes=buffer_bytes, clock_us=lambda: BASE)


def removed(at: int) -> KVEvent:
    return BlockRemoved([at.to_bytes(4)])


async def heard(follower: Follower) -> list[Event]:
    """What is there to be read now."""
    events: list[Event] = []
    while True:
        try:
            async with asyncio.timeout(0.01):
                frames = await follower.next()
        except TimeoutError:
            return events
        if not frames:
            return events
        events += [event for event in Framer().feed(frames) if isinstance(event, Event)]


async def test_events_are_told_by_kind_with_names_in_hex() -> None:
    made = stream()
    made.publish(
        [
            BlockStored([b"\x00\xff", b"\x01"], b"\xaa", 2, [1, 2, 3, 4], group=1),
            BlockStored([b"\x02"], None, 2, None, tier="host"),
            BlockRemoved([b"\x02"], tier="host"),
            CacheCleared(),
        ]
    )
    events = await heard(made.follow())
    assert [(event.id, event.event) for event in events] == [
        (b"1001", b"stored"),
        (b"1002", b"stored"),
        (b"1003", b"removed"),
        (b"1004", b"cleared"),
    ]
    assert [json.loads(event.data) for event in events] == [
        {
            "names": ["00ff", "01"],
            "parent": "aa",
            "block_size": 2,
            "token_ids": [1, 2, 3, 4],
            "tier": "device",
            "group": 1,
        },
        {"names": ["02"], "parent": None, "block_size": 2, "token_ids": None, "tier": "host", "group": 0},
        {"names": ["02"], "tier": "host", "group": 0},
        {},
    ]


@pytest.mark.parametrize(
    ("after", "first", "reset"),
    [
        (None, 1001, False),
        (1000, 1001, False),  # seen nothing yet, but of this worker's life
        (1003, 1004, False),
        (1005, None, False),
        (1006, 1001, True),  # a number that was never given
        (7, 1001, True),  # of a worker's life before this one
    ],
)
async def test_a_follower_goes_on_where_it_stopped(after: int | None, first: int | None, reset: bool) -> None:
    made = stream()
    made.publish([removed(at) for at in range(5)])
    events = await heard(made.follow(after))
    assert [event.event for event in events[:1]] == ([b"reset"] if reset else [b"removed"] if first else [])
    numbers = [int(event.id) for event in events if event.event != b"reset"]
    assert numbers == (list(range(first, 1006)) if first else [])


async def test_what_is_no_longer_kept_is_told_as_a_reset_once() -> None:
    made = stream(buffer_bytes=500)
    made.publish([removed(at) for at in range(100)])
    assert made._kept_bytes <= 500
    assert made.latest == 1100
    for after in (None, 1003):
        follower = made.follow(after)
        gap, *rest = await heard(follower)
        assert (gap.event, int(gap.id)) == (b"reset", made.oldest - 1)
        assert [int(event.id) for event in rest] == list(range(made.oldest, 1101))
        made.publish([CacheCleared()])
        assert [event.event for event in await heard(follower)] == [b"cleared"]
        made.latest -= 1
        made._kept.pop()
    again = await heard(made.follow(int(gap.id)))  # whoever was told the reset, and left
    assert [event.event for event in again] == [b"removed"] * len(rest)


async def test_a_reset_does_not_wait_for_the_next_event() -> None:
    (event,) = await heard(stream().follow(7))
    assert event.event == b"reset"


async def test_an_event_over_the_bound_is_not_kept_and_not_lost_in_silence() -> None:
    made = stream(buffer_bytes=500)
    follower = made.follow()
    made.publish([BlockStored([b"\x01"], None, 1000, [7] * 1000)])
    assert (made._kept_bytes, made.oldest, made.latest) == (0, 1002, 1001)
    with pytest.raises(FellBehind):
        await follower.next()


async def test_a_follower_that_falls_behind_is_told_and_costs_nothing() -> None:
    made = stream(buffer_bytes=500)
    slow = made.follow()
    made.publish([removed(1)])
    assert await heard(slow)
    made.publish([removed(at) for at in range(50)])
    assert slow.behind
    with pytest.raises(FellBehind):
        await slow.next()


async def test_waiting_followers_hear_at_once_and_end_with_the_stream() -> None:
    made = stream()
    reading = [asyncio.ensure_future(made.follow().next()) for _ in range(3)]
    await asyncio.sleep(0)
    made.publish([removed(1)])
    for frames in await asyncio.gather(*reading):
        assert frames.startswith(b"id: 1001\n")
    waiting = asyncio.ensure_future(made.follow(1001).next())
    await asyncio.sleep(0)
    made.close()
    assert await waiting == b""
    assert await made.follow().next() == b""


async def test_much_that_waits_comes_in_pieces() -> None:
    made = KVEventStream(clock_us=lambda: BASE)
    made.publish([BlockStored([bytes(32)], None, 1000, [50_000] * 1000) for _ in range(200)])
    follower = made.follow()
    pieces = [len(await follower.next()) for _ in range(5)]
    assert max(pieces) <= 256 * 1024
    assert len(await heard(follower)) < 200


def test_numbers_of_a_later_life_are_above() -> None:
    first = KVEventStream()
    first.publish([removed(at) for at in range(3)])
    second = KVEventStream()
    assert second.oldest > first.oldest


@given(st.lists(st.one_of(st.integers(1, 12), st.sampled_from(["read", "leave"])), max_size=60))
def test_a_follower_that_comes_back_misses_nothing_without_a_reset(steps: list[int | str]) -> None:
    """Its own list of events is an unbroken run from the beginning, or from the latest reset, up to the latest."""

    async def run() -> None:
        made = stream(buffer_bytes=600)
        follower = made.follow()
        last_id: int | None = None
        known: list[int] = []
        began = BASE
        for step in [*steps, "read"]:
            if isinstance(step, int):
                made.publish([removed(at) for at in range(step)])
                continue
            if step == "leave" or follower.behind:
                follower = made.follow(last_id)
            while follower._gap or follower._after < made.latest:
                for event in Framer().feed(await follower.next()):
                    assert isinstance(event, Event)
                    last_id = int(event.id)
                    if event.event == b"reset":
                        known.clear()
                        began = last_id
                    else:
                        known.append(last_id)
            assert known == list(range(made.latest - len(known) + 1, made.latest + 1))
            assert known[:1] == [began + 1] or made.latest == began

    asyncio.run(run())
