"""E-mail addresses and phone numbers.

A phone number is one by its plus sign, by the way it is grouped, or by a word before it: digits alone may be anything.
The library that knows every country's numbering plan takes 0.1 ms for each candidate and refuses ranges that are newer
than itself; here a number that looks like one is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.redaction.spans import ALNUM, DIGITS, Span, compiled, digits_of, found, stands_alone

EMAIL: Final = "EMAIL"
PHONE: Final = "PHONE"
_HIGH: Final = bytes(range(0x80, 0x100))
"""Bytes of characters beyond ASCII, which addresses may have."""
_LETTERS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" + _HIGH
_DOMAIN: Final = _LETTERS + b"0123456789-."
_SIGNS: Final = b".!#$%&*+/=?^`{|}~'-"
_LOCAL: Final = _LETTERS + b"0123456789_" + _SIGNS
_MOST: Final = 254
"""Bytes of an address on either side of its sign."""


def emails(data: bytes) -> Iterator[Span]:
    at = -1
    while (at := data.find(b"@", at + 1)) >= 0:
        if data[at - 1] not in _LOCAL or data[at + 1 : at + 2] in (b"@", b" ", b""):
            continue
        before = data[max(at - _MOST, 0) : at]
        local = before[len(before.rstrip(_LOCAL)) :].lstrip(_SIGNS)
        after = data[at + 1 : at + 1 + _MOST]
        domain = after[: len(after) - len(after.lstrip(_DOMAIN))].rstrip(b".-")
        if local and _is_domain(domain):
            yield Span(at - len(local), at + 1 + len(domain), EMAIL)


def _is_domain(name: bytes) -> bool:
    labels = name.split(b".")
    last = labels[-1]
    named = len(last) >= 2 and (not last.strip(_LETTERS) or last[:4].lower() == b"xn--")
    return len(labels) >= 2 and named and all(label and label[:1] != b"-" for label in labels)


_WORDS: Final = (
    "tel|phone|telephone|telefon|telefono|fon|mobile?|mobil|movil|cell|cellulare|call|dial|fax|whatsapp|sms|handy|ph"
    "|rufnummer"
)
_BETWEEN: Final = r"[ ().\-/]{0,3}"
_PHONE = compiled(
    rf"\+\(?[1-9](?:{_BETWEEN}[0-9]){{6,14}}"
    rf"|\b00[1-9](?:{_BETWEEN}[0-9]){{7,12}}"
    r"|(?:\b1[ .-])?(?:\([2-9][0-9]{2}\) ?|\b[2-9][0-9]{2}[ .-])[2-9][0-9]{2}[ .-][0-9]{4}"
    r"|\b0[1-9](?:[ .-][0-9]{2}){4}"
    r"|(?:\(0[1-9][0-9]{0,4}\)|\b0[1-9][0-9]{0,4})(?:(?:[ /-]{1,3}[0-9]{2,8}){2,4}|[ /-]{1,3}[0-9]{5,9})"
    r"|\b0(?:1[5-7]|[67])[0-9]{7,9}"
    rf"|(?i)\b(?:{_WORDS})[a-z]?\b(?:[ .:#=]{{0,3}}\b(?:me|us|at|is|on|no|nr|number|num)\b){{0,2}}[ \t.:#=]{{0,4}}"
    rf"\(?[0-9](?:{_BETWEEN}[0-9]){{5,14}}"
)
_DATE = re.compile(rb"\(?[0-9]{1,2}[./ -][0-9]{1,2}[./ -](?:19|20)[0-9]{2}(?![0-9])|(?:19|20)[0-9]{2}[./-]")
_PAIR_BEFORE = re.compile(rb"(?:^|[^0-9])[0-9]{2} $")
_PAIR_AFTER = re.compile(rb" [0-9]{2}(?:[^0-9]|$)")
_NUMBER = re.compile(rb"\(?[0-9]")


def phones(data: bytes) -> Iterator[Span]:
    return (Span(*place, PHONE) for place in found(_PHONE, data, _phone))


def _phone(data: bytes, start: int, end: int) -> tuple[int, int] | None:
    named = data[start : start + 1].isalpha()
    if named:
        number = _NUMBER.search(data, start)
        if number is None:
            return None
        start = number.start()
    international = data[start : start + 1] == b"+" or data[start : start + 2] == b"00"
    if international:
        end = _whole_groups(data, start, end)
        if end < 0 or (start and (data[start - 1] in ALNUM or data[start - 1] in b"+.,")):
            return None
    elif not stands_alone(data, start, end, b".,-/:+") or _listed(data, start, end):
        return None
    count = len(digits_of(data[start:end]))
    if international:
        return (start, end) if 7 <= count <= 17 else None
    if _DATE.match(data, start):
        return None
    least = 6 if named else 9
    return (start, end) if least <= count <= 15 else None


def _whole_groups(data: bytes, start: int, end: int) -> int:
    """Where it ends, if the last group that it takes from is more than it can have: before that. -1: nowhere."""
    if end < len(data) and data[end] in DIGITS:
        while end > start and data[end - 1] in DIGITS:
            end -= 1
        end = start + len(data[start:end].rstrip(b" ().-/"))
    return end if end > start + 1 else -1


def _listed(data: bytes, start: int, end: int) -> bool:
    """Whether it is part of a row of pairs of digits."""
    before, after = data[max(start - 4, 0) : start], data[end : end + 4]
    return _PAIR_BEFORE.search(before) is not None or _PAIR_AFTER.match(after) is not None
