"""What can be asked of the ledger: a query, checked, and the cursor that leads from one page to the next."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Literal, get_args
from zoneinfo import ZoneInfo

import msgspec

from gateway.billing.local_time import Range, common, day_range, hour_range, merged, month_range
from gateway.billing.usage import Status

Dimension = Literal["tenant", "project", "key", "model", "backend", "end_user", "tag", "status", "hour", "day", "month"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
STATUSES: tuple[Status, ...] = get_args(Status)
Measure = Literal[
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "images",
    "compute_us",
    "charged",
    "cost",
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
HIDDEN_FROM_TENANTS: frozenset[str] = frozenset({"tenant", "backend", "cost"})
"""Dimensions and measures that only administrators see: others' names, our machines, and what they cost us."""
MAX_VALUES = 100
"""Of one filter."""
MAX_LIMIT = 10_000
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime(2200, 1, 1, tzinfo=UTC)


class InvalidReport(ValueError):
    """A report that cannot be made as asked; the message says what to change, ``parameter`` where."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class NotFound(InvalidReport):
    """What a filter names is not there, or is another tenant's."""

    def __init__(self, parameter: str, value: str) -> None:
        super().__init__(parameter, f"there is no {parameter} {value[:100]!r}")


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Requests admitted at or after ``start`` and before ``end`` that pass every filter, summed apart by ``group_by``.

    A filter is the values of one dimension, any of which will do; an empty one lets everything pass.
    """

    start: datetime | None = None
    """Timezone-aware; None: from the first request on."""
    end: datetime | None = None
    timezone: str = "UTC"
    """IANA name of the zone whose hours, days and months are meant."""
    group_by: Sequence[Dimension] = ()
    """In the order in which rows are sorted. None: one row."""
    tenant: Sequence[str] = ()
    """Names or ids; so with projects."""
    project: Sequence[str] = ()
    key: Sequence[str] = ()
    """Public ids."""
    model: Sequence[str] = ()
    backend: Sequence[str] = ()
    """'': no backend was reached."""
    end_user: Sequence[str] = ()
    """As the client named them, or the keyed hashes that reports show."""
    tag: Sequence[str] = ()
    status: Sequence[Status] = ()
    hour: Sequence[datetime] = ()
    """Any moment in the hour."""
    day: Sequence[date] = ()
    month: Sequence[str] = ()
    """``2026-11``."""
    order_by: str | None = None
    """A measure, or a dimension that is grouped by; ``-`` in front: largest first. None: as grouped."""
    limit: int | None = None
    """Most rows. None: all."""
    cursor: str | None = None
    """Where the page before ended."""

    def checked(self) -> CheckedQuery:
        """Raises InvalidReport."""
        return CheckedQuery(self)


class CheckedQuery:
    """A query that can be answered, with its values in the form in which they are used."""

    def __init__(self, query: UsageQuery) -> None:
        self.query = query
        self.zone = zone_named(query.timezone)
        self.group_by = tuple(dict.fromkeys(query.group_by))
        for dimension in self.group_by:
            if dimension not in DIMENSIONS:
                raise InvalidReport("group_by", f"group_by takes {', '.join(DIMENSIONS)}")
        for dimension in DIMENSIONS:
            _check_filter(dimension, getattr(query, dimension))
        for status in query.status:
            if status not in STATUSES:
                raise InvalidReport("status", f"status takes {', '.join(STATUSES)}")
        if query.limit is not None and not 1 <= query.limit <= MAX_LIMIT:
            raise InvalidReport("limit", f"limit must be between 1 and {MAX_LIMIT}")
        self.ranges = self._ranges()
        self.order_by, self.descending = self._order()

    @property
    def from_rows(self) -> bool:
        """Whether rollups do not tell it: they know neither end users nor tags."""
        named = {"end_user", "tag"}
        return not named.isdisjoint(self.group_by) or bool(self.query.end_user or self.query.tag)

    def _ranges(self) -> list[Range]:
        query = self.query
        ranges = merged([range_of(query.start, query.end)])
        try:
            if query.month:
                ranges = common(ranges, merged(month_range(parse_month(month), self.zone) for month in query.month))
            if query.day:
                ranges = common(ranges, merged(day_range(_near(day), self.zone) for day in query.day))
            if query.hour:
                for hour in query.hour:
                    _check_zoned("hour", hour)
                hours = (min(max(hour, _EARLIEST), _LATEST) for hour in query.hour)
                ranges = common(ranges, merged(hour_range(hour, self.zone) for hour in hours))
        except OverflowError:
            return []
        return ranges

    def _order(self) -> tuple[str | None, bool]:
        asked = self.query.order_by
        if asked is None:
            return None, False
        name = asked.removeprefix("-")
        if name not in MEASURES and name not in self.group_by:
            raise InvalidReport(
                "order_by",
                f"order_by takes {', '.join(MEASURES)}, or what group_by names, each with a - in front for the "
                "largest first",
            )
        return name, asked.startswith("-")

    def fingerprint(self, viewer: str) -> str:
        """Of all that decides which rows come in which order, and for whom."""
        asked = msgspec.structs.asdict(self.query) | {"limit": None, "cursor": None}
        asked |= {name: sorted(map(str, asked[name])) for name in DIMENSIONS}
        digest = hashlib.sha256(msgspec.json.encode([viewer, asked], order="deterministic"))
        return digest.hexdigest()[:24]


def zone_named(name: str) -> ZoneInfo:
    """Raises InvalidReport."""
    try:
        return ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidReport(
            "timezone", f"{name[:100]!r} is not a time zone; use an IANA name such as Europe/Berlin"
        ) from None


def range_of(start: datetime | None, end: datetime | None) -> Range:
    """Bounds in UTC. Raises InvalidReport."""
    for name, moment in (("start", start), ("end", end)):
        if moment is not None:
            _check_zoned(name, moment)
    if start is not None and end is not None and start >= end:
        raise InvalidReport("end", "start must be before end")
    # No row lies outside of these, and arithmetic near the calendar's own ends would overflow.
    begin = min(max(start or _EARLIEST, _EARLIEST), _LATEST).astimezone(UTC)
    finish = max(min(end or _LATEST, _LATEST), _EARLIEST).astimezone(UTC)
    return begin, finish


def parse_month(text: str) -> date:
    """The first day of a month written ``2026-11``. Raises InvalidReport."""
    try:
        if len(text) != 7 or not text.isascii():
            raise ValueError
        first = date.fromisoformat(f"{text}-01")
    except ValueError:
        raise InvalidReport("month", f"{text[:100]!r} is not a month; write it as 2026-11") from None
    if not _EARLIEST.year <= first.year < _LATEST.year:
        raise InvalidReport("month", f"{text} lies outside of what is reported; give a month of a year near ours")
    return first


def _near(day: date) -> date:
    return min(max(day, _EARLIEST.date()), _LATEST.date())


def _check_zoned(name: str, moment: datetime) -> None:
    if moment.tzinfo is None:
        raise InvalidReport(name, f"{name} needs a time zone: write 2027-01-01T00:00:00Z")


def _check_filter(name: str, values: Sequence[object]) -> None:
    if len(values) > MAX_VALUES:
        raise InvalidReport(name, f"{name} takes at most {MAX_VALUES} values at a time")
    for value in values:
        # Postgres takes neither as text, and no name holds them.
        if isinstance(value, str) and ("\0" in value or len(value) > 1000 or not _is_text(value)):
            raise InvalidReport(name, f"{name} holds something that cannot be its value")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


Position = list[str | int]
"""Sort values of the last row of a page."""


def encode_cursor(fingerprint: str, position: Position) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([fingerprint, position])).decode().rstrip("=")


def decode_cursor(text: str, fingerprint: str, kinds: Sequence[type]) -> Position:
    """The position in it. Not secret and not signed: what it can do is choose where to begin in a query's own answer.

    Raises InvalidReport unless it was made for this query and holds values of these kinds.
    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        made_for, position = msgspec.json.decode(raw, type=tuple[str, list[str | int]])
    except (binascii.Error, ValueError):
        raise InvalidReport("cursor", "cursor is none that a report has given; leave it out to begin anew") from None
    if made_for != fingerprint:
        raise InvalidReport(
            "cursor", "cursor belongs to another query; repeat the query it came from unchanged, or leave it out"
        )
    fits = len(position) == len(kinds) and all(map(isinstance, position, kinds))
    if not fits or any(isinstance(v, str) and ("\0" in v or not _is_text(v)) for v in position):
        raise InvalidReport("cursor", "cursor is none that a report has given; leave it out to begin anew")
    return position
