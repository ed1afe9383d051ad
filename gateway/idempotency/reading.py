"""A follower's side of an entry: it reads what the owner wrote, from the beginning, and on while there comes more."""

from __future__ import annotations

import asyncio
from uuid import UUID

from gateway.admission.redis import RedisUnavailable
from gateway.idempotency.framing import Unframer
from gateway.idempotency.scope import Scope
from gateway.idempotency.share import PIECES_PER_CALL, PURPOSE, context
from gateway.idempotency.store import Store
from gateway.secret_key import SealBroken, SecretKey

SHORTEST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
PATIENCE_S = 2.0
"""How long Redis may fail before the reading does."""


class Unreadable(Exception):
    """What is kept cannot be read: it was changed, or parts of it are gone."""


class Reading:
    """One owner's answer, and never a part of another's. It holds no connection while it waits."""

    def __init__(self, store: Store, secret_key: SecretKey, scope: Scope, owner: UUID) -> None:
        self.owner = owner
        self.complete = False
        self._store = store
        self._secret_key = secret_key
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._frames = Unframer()
        self._known = 0
        self._pause_s = SHORTEST_PAUSE_S
        self._next_look = 0.0
        self._failing_since: float | None = None

    async def events(self, until: float) -> list[bytes]:
        """What came since the last call, at least one event; none if ``until`` (loop time) passed, or at the end.

        Raises Lost, Unreadable, RedisUnavailable.
        """
        while not self.complete:
            now = self._loop.time()
            if now < self._next_look:
                if now >= until:
                    return []
                await asyncio.sleep(min(self._next_look, until) - now)
                continue
            events = await self._look()
            if events:
                return events
        return []

    async def _look(self) -> list[bytes]:
        try:
            pieces = await self._store.read(self._scope, self.owner, self._known, PIECES_PER_CALL)
        except RedisUnavailable:
            now = self._loop.time()
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= PATIENCE_S:
                raise
            self._next_look = now + LONGEST_PAUSE_S
            return []
        self._failing_since = None
        events = [event for piece in pieces.found for event in self._open(piece)]
        everything = self._known >= pieces.known
        if pieces.done and everything:
            if not self._frames.empty:
                raise Unreadable
            self.complete = True
        elif pieces.found:
            self._pause_s = SHORTEST_PAUSE_S
        else:
            self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)
        self._next_look = self._loop.time() + self._pause_s if everything else 0.0
        return events

    def _open(self, piece: bytes) -> list[bytes]:
        place = context(self._scope, self.owner, self._known)
        try:
            data = self._secret_key.unseal(PURPOSE, piece, context=place)
        except SealBroken as fault:
            raise Unreadable from fault
        self._known += 1
        return self._frames.feed(data)
