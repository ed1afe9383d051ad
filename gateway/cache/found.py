"""What a look-up comes to: a hit, or a miss that can be told the model's answer later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal

import msgspec

from gateway.billing.usage import TokenUsage
from gateway.cache.entry import Entry
from gateway.cache.flights import Flight
from gateway.cache.parts import Facts

Tier = Literal["exact", "semantic"]
Outcome = Literal["miss", "shadow_hit", "verify", "bypass", "unavailable", "refresh"]
FOLLOW_LIMIT_S: Final = 30.0


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was kept."""

    tier: Tier
    body: bytes
    """The whole answer, JSON, as the API has it."""
    usage: TokenUsage
    """What it took to make."""
    made_at: datetime
    origin: str
    """Id of the request that made it."""
    similarity: float | None = None
    """Cosine, of a semantic hit."""


def hit(entry: Entry, tier: Tier, similarity: float | None = None) -> Hit:
    return Hit(
        tier=tier,
        body=entry.body,
        usage=entry.usage,
        made_at=entry.made_at,
        origin=entry.request_id,
        similarity=similarity,
    )


class Answer(msgspec.Struct, frozen=True):
    """What the model said after a miss."""

    body: bytes
    usage: TokenUsage
    facts: Facts
    request_id: str


class Miss:
    """The model is to be asked. Exactly one of ``keep`` and ``drop`` should follow; later calls do nothing.

    ``following``: an identical request is under way already, and shares its answer: ``await miss.follow()``.
    """

    def __init__(
        self,
        outcome: Outcome,
        *,
        reason: str = "",
        keep: Callable[[Answer], Entry | None] | None = None,
        flight: Flight | None = None,
        leads: bool = False,
        taken: Callable[[Entry | None], Hit | None] | None = None,
        candidate: Hit | None = None,
    ) -> None:
        """``keep`` gives what is going to be kept. ``taken``: what a follower makes of what the leader's flight came
        to."""
        self.outcome: Outcome = outcome
        self.reason = reason
        """Of a bypass, in a word."""
        self.candidate = candidate
        """Of ``shadow_hit`` and ``verify``: what would have been answered."""
        self._keep = keep
        self._flight = flight
        self._leads = leads
        self._taken = taken

    @property
    def keeps(self) -> bool:
        """Whether anybody wants the answer."""
        return self._keep is not None

    @property
    def following(self) -> bool:
        return self._flight is not None and not self._leads

    async def follow(self, limit_s: float = FOLLOW_LIMIT_S) -> Hit | Miss:
        """The leader's answer, if it is kept within the limit, and good for this request too; else a miss of its own,
        which leads nobody."""
        flight, self._flight = self._flight, None
        if flight is None or self._leads or self._taken is None:
            return self
        found = self._taken(await flight.landed(limit_s))
        return self if found is None else found

    def keep(self, body: bytes, usage: TokenUsage, facts: Facts, request_id: str) -> None:
        """The whole answer, as the client got it. Neither waits nor raises; whether it is kept is the cache's say."""
        keep, self._keep = self._keep, None
        entry: Entry | None = None
        try:
            entry = None if keep is None else keep(Answer(body, usage, facts, request_id))
        finally:
            self._land(entry)

    def drop(self) -> None:
        """No good answer came. Who follows goes on by itself."""
        self._keep = None
        self._land(None)

    def _land(self, entry: Entry | None) -> None:
        flight, self._flight = self._flight, None
        if flight is not None and self._leads:
            flight.land(entry)
