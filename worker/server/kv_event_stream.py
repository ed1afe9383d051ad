"""Changes of the prefix cache as server-sent events: numbered, kept for a while, read by any number of followers.

Each event bears its sequence number as ``id``, its kind as ``event`` and JSON as ``data``; block names are hex::

    id: 1790000000000001
    event: stored
    data: {"names":["9f..."],"parent":null,"block_size":16,"token_ids":[1,2],"tier":"device","group":0}

    event: removed     data: {"names":["9f..."],"tier":"device","group":0}
    event: cleared     data: {}
    event: reset       data: {}

Numbers grow by one from event to event. They begin at the clock's microseconds, so that those of a worker that was
started again are above all it gave before. ``reset`` says that events are missing before the next one: forget what
you know of this worker's cache. A follower that has seen nothing gets all that is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from worker.protocol.kv_events import BlockRemoved, BlockStored, KVEvent
from worker.protocol.sse import encode_event

_BUFFER_BYTES: Final = 16 * 1024 * 1024
_BATCH_BYTES: Final = 256 * 1024
"""Most that ``Follower.next`` hands on at once, but for one event that is longer."""


class FellBehind(Exception):
    """Events that the follower had not read yet are no longer kept."""


class KVEventStream:
    """The numbered events, the latest of them kept within a bound. Belongs to one event loop."""

    def __init__(
        self, *, buffer_bytes: int = _BUFFER_BYTES, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._bound = buffer_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._base = clock_us()
        self.latest = self._base
        """Number of the latest event; before any: one less than the first will have."""
        self._news = asyncio.Event()
        self.closed = False

    @property
    def oldest(self) -> int:
        """Number of the oldest event that is kept; ``latest`` + 1 if none is."""
        return self.latest - len(self._kept) + 1

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Number ``events`` and let the followers have them. This is ``EngineClient.on_kv_events``."""
        for event in events:
            self.latest += 1
            frame = b"id: %d\n" % self.latest + encode_event(_data(event), event=_kind(event))
            self._kept.append(frame)
            self._kept_bytes += len(frame)
        while self._kept_bytes > self._bound:
            self._kept_bytes -= len(self._kept.popleft())
        if events:
            self._tell()

    def close(self) -> None:
        """End all followers: the worker is stopping."""
        self.closed = True
        self._tell()

    def follow(self, after: int | None = None) -> Follower:
        """Read on behind event ``after``; None: whoever asks has seen nothing."""
        return Follower(self, after)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _frames(self, after: int) -> list[bytes]:
        """Kept events behind ``after``, up to a batch. ``after`` lies between ``oldest`` - 1 and ``latest``."""
        frames: list[bytes] = []
        size = 0
        for at in range(after + 1 - self.oldest, len(self._kept)):
            frame = self._kept[at]
            size += len(frame)
            if frames and size > _BATCH_BYTES:
                break
            frames.append(frame)
        return frames


class Follower:
    """One reader's place in the stream. It keeps no events of its own, so a slow one costs no memory."""

    def __init__(self, stream: KVEventStream, after: int | None) -> None:
        self._stream = stream
        start = stream._base if after is None else after
        self._gap = not stream.oldest - 1 <= start <= stream.latest
        self._after = stream.oldest - 1 if self._gap else start

    @property
    def behind(self) -> bool:
        """Whether events that were not read yet are gone."""
        return self._after < self._stream.oldest - 1

    async def next(self) -> bytes:
        """The next events as they go over the wire, as soon as there are any; empty once the stream is closed.

        Raises FellBehind; a new follower then begins with a ``reset``. Waiting may be cancelled and taken up again.
        """
        stream = self._stream
        while not stream.closed:
            if self.behind:
                raise FellBehind
            frames = stream._frames(self._after)
            if self._gap:
                # At once and not with the next event: until then the reader would trust what is wrong.
                frames.insert(0, b"id: %d\n" % self._after + encode_event(b"{}", event=b"reset"))
            if frames:
                self._after += len(frames) - self._gap
                self._gap = False
                return b"".join(frames)
            await stream._news.wait()
        return b""


def _kind(event: KVEvent) -> bytes:
    if isinstance(event, BlockStored):
        return b"stored"
    return b"removed" if isinstance(event, BlockRemoved) else b"cleared"


def _data(event: KVEvent) -> bytes:
    fields: dict[str, Any] = {}
    if isinstance(event, BlockStored):
        fields = {
            "names": [name.hex() for name in event.names],
            "parent": None if event.parent is None else event.parent.hex(),
            "block_size": event.block_size,
            "token_ids": event.token_ids,
            "tier": event.tier,
            "group": event.group,
        }
    elif isinstance(event, BlockRemoved):
        fields = {"names": [name.hex() for name in event.names], "tier": event.tier, "group": event.group}
    return msgspec.json.encode(fields)
