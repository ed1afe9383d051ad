"""A tenant's log read: lists, one entry, a text, an export; and feedback attached to entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final
from uuid import UUID

import msgspec
import structlog

from gateway.admission.redis import RedisClient
from gateway.clock import Clock
from gateway.datakeys.service import DataKeys
from gateway.policies.prompt_log import CustomPattern
from gateway.promptlog.entry import MAX_COMMENT, Asked, Feedback, Logged, NotReplayable, Summary
from gateway.promptlog.exporting import line
from gateway.promptlog.filters import NO_FILTERS, Filters, span_of
from gateway.promptlog.opened import Opened, Opener
from gateway.promptlog.sealing import LOOP_BYTES, MakeRedactor, pack_feedback, remembered
from gateway.promptlog.search import Needle
from gateway.promptlog.store import Bodies, Store

MAX_LIMIT: Final = 500
BATCH: Final = 250
EXAMINED: Final = 2000
PAGE_S: Final = 0.05
"""Most entries that one page looks at, and for how long; a rare match is found by going on with the cursor."""
SCAN_S: Final = 2.0
SCAN_BYTES: Final = 64 * 1024 * 1024
"""Of bodies, before compression, that one scan looks through."""
IN_FLIGHT_BYTES: Final = 2 * 1024 * 1024
"""Of bodies held at once, before compression, unless one entry has more."""
_log = structlog.get_logger(__name__)


class Page(msgspec.Struct, frozen=True):
    """Newest first. ``cursor``: where to go on, also of a page with few entries or none; None: that was all."""

    entries: list[Summary]
    cursor: str | None
    examined: int
    """Entries that were looked at."""


class Reader:
    """Raises RedisUnavailable, DatabaseUnavailable and UnknownMasterKey from each method, and BadCursor from those that
    take one. What was erased, or trimmed, is not there. ``redis``: a connection of its own. ``make_redactor``: without
    one, no comment is kept beside an entry that was not logged in full.
    """

    def __init__(
        self, redis: RedisClient, data_keys: DataKeys, clock: Clock, make_redactor: MakeRedactor | None = None
    ) -> None:
        self._store = Store(redis)
        self._opener = Opener(self._store, data_keys)
        self._clock = clock
        self._make_redactor = None if make_redactor is None else remembered(make_redactor)

    async def page(
        self, tenant_id: UUID, filters: Filters = NO_FILTERS, *, cursor: str | None = None, limit: int = 50
    ) -> Page:
        """At most ``limit`` entries, 1 to 500, without their bodies. It looks at 2,000 at most, and for 50 ms."""
        limit = _within(limit)
        span = span_of(filters, cursor, await self._store.latest_after(tenant_id))
        until = self._clock.monotonic() + PAGE_S
        found: list[Opened] = []
        examined, more = 0, False
        # One more than are wanted tells whether there are more.
        count = limit + 1 if filters == NO_FILTERS else BATCH
        async with aclosing(self._opener.batches(tenant_id, span, count)) as batches:
            async for batch in batches:
                spent = examined > 0 and self._clock.monotonic() >= until
                for opened in batch:
                    if spent or len(found) == limit or examined == EXAMINED:
                        more = True
                        break
                    examined += 1
                    cursor = opened.row.place
                    if opened.facts is not None and filters.match(opened.facts):
                        found.append(opened)
                if more:
                    break
        return Page(await self._opener.summaries(tenant_id, found), cursor if more else None, examined)

    async def entry(self, tenant_id: UUID, request_id: UUID) -> Logged | None:
        """One entry whole."""
        row = await self._store.row(tenant_id, request_id)
        if row is None:
            return None
        (opened,) = await self._opener.open(tenant_id, [row])
        if opened.facts is None or opened.key is None:
            return None
        (sealed,) = await self._store.bodies(tenant_id, [request_id])
        bodies = await asyncio.to_thread(self._opener.bodies, sealed, opened.key, tenant_id, request_id)
        (summary,) = await self._opener.summaries(tenant_id, [opened])
        return Logged(facts=opened.facts, feedback=summary.feedback, request=bodies.request, response=bodies.response)

    async def asked(self, tenant_id: UUID, request_id: UUID) -> Asked | None:
        """The request as it was asked, to be asked again. Raises NotReplayable if it is not there whole."""
        logged = await self.entry(tenant_id, request_id)
        if logged is None:
            return None
        facts = logged.facts
        if facts.level == "metadata":
            raise NotReplayable("it was logged without its body; set the tenant's level to redacted or full")
        if facts.request_cut:
            raise NotReplayable("its body was cut when it was logged; raise max_body_bytes of the tenant's log")
        if logged.request is None:
            raise NotReplayable("its body is not in Redis any more, which has evicted it for want of memory")
        return Asked(
            api=facts.api,
            model=facts.model,
            body=logged.request,
            redacted=facts.level == "redacted",
            project_id=facts.project_id,
            end_user=facts.end_user,
        )

    async def feedback(
        self,
        tenant_id: UUID,
        request_id: UUID,
        score: float,
        comment: str | None = None,
        *,
        patterns: tuple[CustomPattern, ...] = (),
    ) -> bool:
        """Attach a score, from -1 (bad) to 1 (good); the last one counts. False: there is no such entry.

        The comment is redacted, with the tenant's ``patterns``, unless the entry was logged in full. It is sealed by
        the entry's own key, and so erased with it. Raises ValueError.
        """
        feedback = Feedback(score=score, comment=comment, given_at=self._clock.now())
        row = await self._store.row(tenant_id, request_id)
        if row is None:
            return False
        (opened,) = await self._opener.open(tenant_id, [row])
        if opened.key is None or opened.facts is None:
            return False
        if comment is not None and opened.facts.level != "full":
            feedback = msgspec.structs.replace(feedback, comment=self._redacted(comment, patterns))
        sealed = pack_feedback(feedback, opened.key, tenant_id, request_id)
        return await self._store.attach_feedback(tenant_id, request_id, sealed)

    def _redacted(self, comment: str, patterns: tuple[CustomPattern, ...]) -> str | None:
        if self._make_redactor is None:
            return None
        try:
            return self._make_redactor(patterns).text(comment)[:MAX_COMMENT]
        except Exception as fault:
            # Its kind alone, for its text might hold some of the comment.
            _log.error("comment_not_redacted", error=type(fault).__name__)
            return None

    async def scan(
        self,
        tenant_id: UUID,
        text: str,
        filters: Filters = NO_FILTERS,
        *,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page:
        """Entries whose request or response has ``text`` in it, whatever its letters' case.

        It looks for 2 s, or through 64 MiB of bodies, or at 2,000 entries, and at one at least. Raises ValueError for
        an empty text.
        """
        needle, limit = Needle(text), _within(limit)
        span = span_of(filters, cursor, await self._store.latest_after(tenant_id))
        until = self._clock.monotonic() + SCAN_S
        found: list[Opened] = []
        examined, read, more = 0, 0, False
        async with aclosing(self._opener.batches(tenant_id, span, BATCH)) as batches:
            async for batch in batches:
                for piece in _pieces(batch, filters):
                    spent = read >= SCAN_BYTES or self._clock.monotonic() >= until
                    if examined and (spent or len(found) == limit or examined + len(piece) > EXAMINED):
                        more = True
                        break
                    matching, last = await self._search(tenant_id, piece, filters, needle, limit - len(found))
                    found += matching
                    examined += last + 1
                    read += sum(_wanted_bytes(each, filters) for each in piece)
                    cursor = piece[last].row.place
                    if last + 1 < len(piece):
                        more = True
                        break
                if more:
                    break
        return Page(await self._opener.summaries(tenant_id, found), cursor if more else None, examined)

    async def _search(
        self, tenant_id: UUID, piece: Sequence[Opened], filters: Filters, needle: Needle, most: int
    ) -> tuple[list[Opened], int]:
        """At most ``most`` that match, and the index of the last one that was looked at."""
        candidates = [(index, each) for index, each in enumerate(piece) if _wanted_bytes(each, filters)]
        sealed = await self._store.bodies(tenant_id, [each.row.request_id for _, each in candidates])

        def look() -> tuple[list[Opened], int]:
            matching: list[Opened] = []
            for (index, each), bodies in zip(candidates, sealed, strict=True):
                if any(body is not None and needle.within(body) for body in self._bodies(tenant_id, each, bodies)):
                    matching.append(each)
                    if len(matching) == most:
                        return matching, index
            return matching, len(piece) - 1

        return await asyncio.to_thread(look)

    async def export(self, tenant_id: UUID, filters: Filters = NO_FILTERS) -> AsyncGenerator[bytes, None]:
        """Lines of JSON, oldest first: what is in the log as the export begins. A few MB are held at once."""
        span = span_of(filters, None, await self._store.latest_after(tenant_id), newest_first=False)
        newest = await self._store.newest_place(tenant_id)
        if newest is None:
            return
        if span.newest == "+" or int(span.newest) > int(newest.partition("-")[0]):
            span.newest = newest
        async with aclosing(self._opener.batches(tenant_id, span, BATCH)) as batches:
            async for batch in batches:
                chosen = [each for each in batch if each.facts is not None and filters.match(each.facts)]
                for piece in _pieces(chosen, filters):
                    ids = [each.row.request_id for each in piece]
                    sealed = await self._store.bodies(tenant_id, ids)
                    feedback = await self._store.feedback(tenant_id, ids)
                    for each, bodies, given in zip(piece, sealed, feedback, strict=True):
                        if _wanted_bytes(each, filters) < LOOP_BYTES:
                            yield self._line(tenant_id, each, bodies, given)
                        else:
                            yield await asyncio.to_thread(self._line, tenant_id, each, bodies, given)

    def _line(self, tenant_id: UUID, opened: Opened, sealed: Bodies, feedback: bytes | None) -> bytes:
        assert opened.facts is not None
        assert opened.key is not None
        given = self._opener.feedback(feedback, opened.key, tenant_id, opened.row.request_id)
        return line(opened.facts, given, *self._bodies(tenant_id, opened, sealed))

    def _bodies(self, tenant_id: UUID, opened: Opened, sealed: Bodies) -> Bodies:
        assert opened.key is not None
        return self._opener.bodies(sealed, opened.key, tenant_id, opened.row.request_id)


def _wanted_bytes(opened: Opened, filters: Filters) -> int:
    facts = opened.facts
    return facts.request_bytes + facts.response_bytes if facts is not None and filters.match(facts) else 0


def _pieces(batch: Sequence[Opened], filters: Filters) -> Iterator[list[Opened]]:
    """Neighbours whose bodies, as far as they are wanted, come to so much that they are held at once."""
    piece: list[Opened] = []
    size = 0
    for each in batch:
        more = _wanted_bytes(each, filters)
        if piece and size + more > IN_FLIGHT_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(each)
        size += more
    if piece:
        yield piece


def _within(limit: int) -> int:
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit must be between 1 and {MAX_LIMIT}")
    return limit
