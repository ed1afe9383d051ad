"""The owner's side of an entry: what its client is sent is written to Redis too, beside it and never in its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Literal
from uuid import UUID

from gateway.admission.redis import RedisUnavailable
from gateway.idempotency.framing import frame
from gateway.idempotency.scope import Scope
from gateway.idempotency.store import Shared, Store
from gateway.secret_key import SecretKey

PURPOSE = "idempotency"
PIECE_BYTES = 32 * 1024
PIECES_PER_CALL = 16
BATCH_S = 0.05
"""Small events that come within this time are written together."""
RETRY_S = 0.2

End = Literal["complete", "dropped"]


def context(scope: Scope, owner: UUID, index: int) -> bytes:
    """What a sealed piece is bound to: no piece passes for another, nor for one of another owner's answer."""
    return f"{scope.hash} {owner} {index}".encode()


class Share:
    """``put`` what is sent, then ``finish`` or ``drop``; none of them waits. ``run`` does the work.

    While Redis does not answer, what was put is held, up to the size of an answer that is kept, and as long as the
    lease may last; then the entry is given up and the next request with the key runs anew.
    """

    def __init__(self, store: Store, secret_key: SecretKey, scope: Scope, owner: UUID) -> None:
        self.scope = scope
        self.owner = owner
        self._store = store
        self._secret_key = secret_key
        self._loop = asyncio.get_running_loop()
        self._lease_ends = self._loop.time() + store.rules.lease_s
        self._buffer = bytearray()
        self._put_bytes = 0
        self._written = 0
        """Pieces that Redis has."""
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        """Not to be held back for others: a piece is full, or the end has come."""
        self._end: End | None = None
        self._closing = False
        self.outcome: Shared | Literal["DROPPED"] | None = None
        """How it ended; None while ``run`` runs."""

    def put(self, events: Sequence[bytes]) -> None:
        """Share events of the answer."""
        if self._end is not None or not events:
            return
        data = frame(events)
        self._put_bytes += len(data)
        if self._put_bytes > self._store.rules.max_answer_bytes:
            self._stop("dropped")
            return
        self._buffer += data
        self._news.set()
        if len(self._buffer) >= PIECE_BYTES:
            self._urgent.set()

    def finish(self) -> None:
        """The answer is complete and good."""
        if self._end is None:
            self._stop("complete")

    def drop(self) -> None:
        """Give the entry up, unless the answer is complete."""
        if self._end is None:
            self._stop("dropped")

    def close(self) -> None:
        """The gateway stops: ``run`` ends soon, whether Redis answers or not."""
        self._closing = True
        self.drop()

    def _stop(self, end: End) -> None:
        self._end = end
        self._news.set()
        self._urgent.set()

    async def run(self) -> None:
        """Write until the end, then return. Raises nothing that Redis does."""
        try:
            self.outcome = await self._write()
        finally:
            self._end = self._end or "dropped"
            self._buffer.clear()

    async def _write(self) -> Shared | Literal["DROPPED"]:
        renewal_s = self._store.rules.lease_s / 4
        not_before = 0.0
        while True:
            await self._wait(self._news, self._loop.time() + renewal_s)
            await self._wait(self._urgent, not_before)
            if self._end == "dropped":
                return await self._give_up()
            not_before = self._loop.time() + BATCH_S
            pieces = self._take()
            # As of now: what comes while this is written is written next.
            complete = self._end == "complete" and not self._buffer
            verdict = await self._send(pieces, complete=complete)
            if verdict is not None and verdict != "SHARED":
                return verdict

    async def _wait(self, event: asyncio.Event, until: float) -> None:
        if until <= self._loop.time():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await event.wait()

    def _take(self) -> list[bytes]:
        """Sealed pieces of what is there, as many as one call carries."""
        sealed: list[bytes] = []
        for start in range(0, min(len(self._buffer), PIECES_PER_CALL * PIECE_BYTES), PIECE_BYTES):
            place = context(self.scope, self.owner, self._written + len(sealed))
            sealed.append(
                self._secret_key.seal(PURPOSE, bytes(self._buffer[start : start + PIECE_BYTES]), context=place)
            )
        del self._buffer[: PIECES_PER_CALL * PIECE_BYTES]
        if self._end is None:
            if not self._buffer:
                self._news.clear()
            if len(self._buffer) < PIECE_BYTES:
                self._urgent.clear()
        return sealed

    async def _send(self, pieces: list[bytes], *, complete: bool) -> Shared | None:
        """None: dropped meanwhile."""
        while self._end != "dropped":
            asked = self._loop.time()
            try:
                verdict = await self._store.share(self.scope, self.owner, self._written, pieces, complete=complete)
            except RedisUnavailable:
                if self._closing or self._loop.time() >= self._lease_ends:
                    return "LOST"
                await asyncio.sleep(RETRY_S)
                continue
            self._lease_ends = asked + self._store.rules.lease_s
            self._written += len(pieces)
            return verdict
        return None

    async def _give_up(self) -> Literal["DROPPED", "TOO_LARGE"]:
        while True:
            with contextlib.suppress(RedisUnavailable):
                await self._store.drop(self.scope, self.owner)
                break
            if self._closing or self._loop.time() >= self._lease_ends:
                break  # it lapses by itself
            await asyncio.sleep(RETRY_S)
        return "TOO_LARGE" if self._put_bytes > self._store.rules.max_answer_bytes else "DROPPED"
