"""Which entries are wanted, and where in the log to look for them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from gateway.promptlog.entry import Kept
from gateway.promptlog.store import is_place, place_at

SKEW: Final = timedelta(minutes=5)
"""By so much the clocks of the Redis that admits and of the one that logs may differ."""


class BadCursor(ValueError):
    """The cursor is none that was given out."""


class Filters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that are given must hold. ``since`` and ``until`` are of the admission, the latter left out itself."""

    since: datetime | None = None
    until: datetime | None = None
    model: str | None = None
    status: str | None = None
    end_user: str | None = None
    """Keyed hash."""
    tag: str | None = None
    project_id: UUID | None = None
    key_id: str | None = None

    def match(self, facts: Kept) -> bool:
        return (
            (self.since is None or facts.admitted_at >= self.since)
            and (self.until is None or facts.admitted_at < self.until)
            and (self.model is None or facts.model == self.model)
            and (self.status is None or facts.status == self.status)
            and (self.end_user is None or facts.end_user == self.end_user)
            and (self.tag is None or self.tag in facts.tags)
            and (self.project_id is None or facts.project_id == self.project_id)
            and (self.key_id is None or facts.key_id == self.key_id)
        )


NO_FILTERS: Final = Filters()


class Span(msgspec.Struct):
    """Places to look between, as Redis takes them; it becomes shorter as they are gone through."""

    oldest: str
    newest: str
    newest_first: bool

    def go_on(self, place: str) -> None:
        """After ``place``."""
        if self.newest_first:
            self.newest = "(" + place
        else:
            self.oldest = "(" + place


def span_of(filters: Filters, cursor: str | None, latest_after: timedelta, *, newest_first: bool = True) -> Span:
    """``latest_after``: how long after its admission an entry may have been written. Raises BadCursor."""
    oldest, newest = "-", "+"
    if filters.since is not None:
        oldest = place_at(filters.since, -SKEW)
    if filters.until is not None:
        newest = place_at(filters.until, latest_after + SKEW)
    span = Span(oldest, newest, newest_first)
    if cursor is not None:
        if not is_place(cursor):
            raise BadCursor("the cursor is not one of this list; leave it out to begin anew")
        span.go_on(cursor)
    return span
