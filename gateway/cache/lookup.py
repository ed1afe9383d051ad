"""One look-up, step by step: names, the exact tier, the semantic tier, its guards; within one limit for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from gateway.cache.embedder import TooLong
from gateway.cache.entry import Entry, Opener, Unreadable
from gateway.cache.found import Hit, Outcome, hit
from gateway.cache.index import Match, SemanticIndex
from gateway.cache.keeping import Draft
from gateway.cache.parts import Counter, Guards, Rejected
from gateway.cache.pause import Pause
from gateway.cache.question import Asked, Meaning, Question, meaning_of
from gateway.cache.store import Store
from gateway.cache.vectors import Vectors
from gateway.clock import Clock
from gateway.long_work import worked
from gateway.secret_key import SecretKey

_LONG_TEXTS: Final = 400
"""Characters of both that are compared beside the event loop."""
Part = Literal["redis", "keys", "embedder", "guards"]
_log = structlog.get_logger(__name__)


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What all look-ups share."""

    store: Store
    opener: Opener
    secret_key: SecretKey
    guards: Guards
    index: SemanticIndex | None
    vectors: Vectors | None
    pauses: dict[Part, Pause]
    clock: Clock
    counter: Counter
    random: Random
    spoiled: Callable[[Question, str], None]
    """Told of an entry that cannot be read any more."""
    index_missing: Callable[[], None]


class Candidate(NamedTuple):
    entry: Entry
    similarity: float


class LookUp:
    """Of one question. If it is broken off, ``part`` and ``draft`` tell what it waited for and how far it got."""

    def __init__(self, room: Room, question: Question, asked: Asked) -> None:
        self._room = room
        self._question = question
        self._asked = asked
        self.part: Part | None = None
        self.draft = Draft(question=question, exact=asked.exact)

    async def run(self) -> Hit | Outcome:
        """Raises what the parts raise, and Paused."""
        question, room = self._question, self._room
        if question.rules.refresh:
            self._ask_for_mark()
            if self._room.index is not None:
                await self._find_meaning()
            return "refresh"
        room.pauses["redis"].check()
        if (found := await self._exact()) is not None:
            return found
        self._ask_for_mark()
        candidate = await self._semantic()
        if candidate is None:
            return "miss"
        would_be = hit(candidate.entry, "semantic", candidate.similarity)
        if not question.rules.shadow and not self._is_sampled():
            return would_be
        self.draft.compare = would_be
        return "shadow_hit" if question.rules.shadow else "verify"

    def _ask_for_mark(self) -> None:
        mark = self._room.store.mark(self._question.tenant_id)
        mark.add_done_callback(lambda done: done.cancelled() or done.exception())  # else the loop tells of it
        self.draft.mark = mark

    async def _find_meaning(self) -> Meaning | None:
        self.part = "guards"
        question, room = self._question, self._room
        find = partial(meaning_of, question, self._asked, room.secret_key, room.guards)
        self.draft.meaning = await worked(question.size, find)
        return self.draft.meaning

    async def _exact(self) -> Hit | None:
        self.part = "redis"
        sealed = await self._room.store.entry(self._question.tenant_id, self.draft.exact)
        self._room.pauses["redis"].went_well()
        if sealed is None or (entry := await self._opened(sealed, self.draft.exact)) is None:
            return None
        return hit(entry, "exact") if entry.good_for(self._question, self._room.clock.now()) else None

    async def _semantic(self) -> Candidate | None:
        room, question = self._room, self._question
        if room.index is None or room.vectors is None:
            return None
        if room.index.available is False:
            room.index_missing()
            return None
        if (meaning := await self._find_meaning()) is None:
            return None
        room.pauses["embedder"].check()
        self.part = "embedder"
        try:
            self.draft.vector = await room.vectors.vector(question.tenant_id, meaning.text)
        except TooLong:
            return None
        room.pauses["embedder"].went_well()
        self.part = "redis"
        matches = await room.index.nearest(question.tenant_id, meaning.partition, self.draft.vector)
        if matches is None:
            room.index_missing()
            return None
        return await self._nearest_alike(meaning, matches)

    async def _nearest_alike(self, meaning: Meaning, matches: list[Match]) -> Candidate | None:
        rejected: list[str] = []
        found: Candidate | None = None
        for match in matches:
            if not match.similarity >= self._question.rules.threshold:  # nor if it is no number
                break
            text = await self._text(match)
            if text is None:
                continue
            self.part = "guards"
            rejection = await self._check(meaning.text, text)
            if rejection is not None:
                rejected.append(rejection.guard)
                self._room.counter.count("rejected", {"guard": rejection.guard})
            elif (entry := await self._candidate(match, meaning.partition, text)) is not None:
                found = Candidate(entry, match.similarity)
                break
        if rejected:
            _log.info(
                "semantic_matches_rejected",
                guards=rejected,
                nearest=round(matches[0].similarity, 4),
                request_id=self._question.request_id,
                tenant=str(self._question.tenant_id),
            )
        return found

    async def _check(self, asked: str, kept: str) -> Rejected | None:
        check = self._room.guards.check
        if len(asked) + len(kept) < _LONG_TEXTS:
            return check(asked, kept)
        return await asyncio.to_thread(check, asked, kept)

    async def _text(self, match: Match) -> str | None:
        self._begin_to_open()
        try:
            text = await self._room.opener.text(match.text, self._question.tenant_id, match.exact)
            self._room.pauses["keys"].went_well()
            return text
        except Unreadable:
            self._room.spoiled(self._question, match.exact)
            return None

    async def _candidate(self, match: Match, partition: str, text: str) -> Entry | None:
        self.part = "redis"
        sealed = await self._room.store.entry(self._question.tenant_id, match.exact)
        if sealed is None or (entry := await self._opened(sealed, match.exact)) is None:
            return None
        same = entry.partition == partition and entry.text == text
        return entry if same and entry.good_for(self._question, self._room.clock.now()) else None

    async def _opened(self, sealed: bytes, exact: str) -> Entry | None:
        self._begin_to_open()
        try:
            entry = await self._room.opener.entry(sealed, self._question.tenant_id, exact)
            self._room.pauses["keys"].went_well()
            return entry
        except Unreadable:
            self._room.spoiled(self._question, exact)
            return None

    def _begin_to_open(self) -> None:
        self._room.pauses["keys"].check()
        self.part = "keys"

    def _is_sampled(self) -> bool:
        share = self._question.rules.verify_share
        return share > 0 and self._room.random.random() < share
