"""Places of a text that are to be blacked out, and how finders look for them.

Texts are UTF-8 while they are looked through: all that built-in finders look for is ASCII, and RE2 works on bytes.
Patterns are RE2's throughout, so they take time in proportion to the text, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import re2

ALNUM: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
DIGITS: Final = frozenset(b"0123456789")
_RUN = re.compile(rb"[^0-9]*[0-9]*")


class Span(NamedTuple):
    start: int
    end: int
    kind: str
    """What it is: the placeholder without its brackets."""


Finder = Callable[[bytes], Iterable[Span]]
"""All places of its kind. What it says of a place depends on little around it, never on the whole text."""


def compiled(pattern: str) -> Any:
    """Of ASCII. It has no groups to capture: without them RE2 needs one pass only."""
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern.encode(), options)


def found(
    pattern: Any, data: bytes, check: Callable[[bytes, int, int], tuple[int, int] | None]
) -> Iterator[tuple[int, int]]:
    """Matches as ``check`` confirms and trims them. Behind one that it refuses, the search goes on at the next group
    of digits, for a true one may begin there."""
    at = 0
    while (match := pattern.search(data, at)) is not None:
        start, end = match.span()
        place = check(data, start, end)
        if place is None:
            group = _RUN.match(data, start, end)
            at = max(group.end() if group is not None else 0, start + 1)
        else:
            yield place
            at = max(place[1], start + 1)


def begins(data: bytes, start: int) -> bool:
    """Whether no letter or digit stands before it; one of an escape, as in a JSON text, is none."""
    if start == 0:
        return True
    before = data[start - 1]
    if before in b"nrt" and start > 1 and data[start - 2] == 0x5C:
        return True
    return before not in ALNUM and before < 0x80 and before != 0x5F


def stands_alone(data: bytes, start: int, end: int, signs: bytes = b".-") -> bool:
    """Whether it is no part of more: no letter or digit is next to it, nor one of the signs with a digit behind."""
    if not begins(data, start) or (start > 1 and data[start - 1] in signs and data[start - 2] in DIGITS):
        return False
    if end < len(data):
        after = data[end]
        if after in ALNUM or after >= 0x80 or after == 0x5F:
            return False
        if after in signs and end + 1 < len(data) and data[end + 1] in DIGITS:
            return False
    return True


def digits_of(data: bytes) -> str:
    return bytes(byte for byte in data if byte in DIGITS).decode()


def widened(data: bytes, span: Span) -> Span:
    """With the whole of the UTF-8 characters at its ends."""
    start, end = span.start, span.end
    while start > 0 and data[start] & 0xC0 == 0x80:
        start -= 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return span if (start, end) == (span.start, span.end) else Span(start, end, span.kind)


def merged(spans: Iterable[Span], rank: Callable[[str], int]) -> list[Span]:
    """In order, without overlaps: what overlaps is one place, of the kind that ranks first."""
    out: list[Span] = []
    for span in sorted(spans):
        if not out or span.start >= out[-1].end:
            out.append(span)
            continue
        last = out[-1]
        kind = min(last.kind, span.kind, key=rank)
        out[-1] = Span(last.start, max(last.end, span.end), kind)
    return out
