"""Payment cards and bank accounts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.redaction import checksums
from gateway.redaction.spans import DIGITS, Span, begins, compiled, digits_of, found, stands_alone

CARD: Final = "CARD"
IBAN: Final = "IBAN"
_CARD = compiled(
    r"[0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{3}\b|[0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{1,7}"
    r"|[0-9]{4}[ -][0-9]{6}[ -][0-9]{4,5}|[0-9]{13,19}"
)
IBAN_MARK: Final = r"(?i:[a-z]{2}[0-9]{2}[ -]?[a-z0-9]{4}[ -]?[a-z0-9]{4})"
_IBAN = compiled(IBAN_MARK)
_IBAN_LENGTHS: Final[dict[str, int]] = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FK FI FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}
_IBAN_FORMS: Final = {
    country.encode(): re.compile(rb"[A-Za-z]{2}[0-9]{2}(?:[ -]?[A-Za-z0-9]){%d}(?![A-Za-z0-9])" % (length - 4))
    for country, length in _IBAN_LENGTHS.items()
}


def is_card(digits: str) -> bool:
    """Whether a number of these digits is one that a card may bear."""
    return len(digits) in _lengths(digits) and checksums.luhn(digits)


def _lengths(digits: str) -> tuple[int, ...]:
    """How long cards are that begin so: none, if none does."""
    two, three, four = int(digits[:2]), int(digits[:3]), int(digits[:4])
    if digits[0] == "4":
        return (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720 or four == 9792:
        return (16,)
    if two in (34, 37):
        return (15,)
    if 300 <= three <= 305 or two in (36, 38, 39):
        return (14, 16, 19)
    if 3528 <= four <= 3589 or two in (60, 62, 64, 65, 81) or 2200 <= four <= 2204:
        return (16, 17, 18, 19)
    if two in (50, 56, 57, 58, 59, 61, 63, 66, 67, 68, 69):
        return (16, 18, 19)
    return ()


def cards(data: bytes) -> Iterator[Span]:
    return (Span(*place, CARD) for place in found(_CARD, data, _card))


def _card(data: bytes, start: int, end: int) -> tuple[int, int] | None:
    if not stands_alone(data, start, end) or _goes_on(data, start, end):
        return None
    written = data[start:end]
    if is_card(digits_of(written)):
        return start, end
    # Digits of something else may stand behind a card's.
    shorter = start + 19
    if end == start + 23 and stands_alone(data, start, shorter) and is_card(digits_of(data[start:shorter])):
        return start, shorter
    return None


def _goes_on(data: bytes, start: int, end: int) -> bool:
    """Whether it is part of a longer row of groups of four."""
    gap = data[start + 4]
    if gap in DIGITS:
        return False
    before, after = data[max(start - 5, 0) : start], data[end : end + 5]
    return any(
        len(each) == 5 and each[at] == gap and each.strip(b" -").isdigit() for each, at in ((before, 4), (after, 0))
    )


def ibans(data: bytes) -> Iterator[Span]:
    return (Span(*place, IBAN) for place in found(_IBAN, data, _iban))


def _iban(data: bytes, start: int, end: int) -> tuple[int, int] | None:
    form = _IBAN_FORMS.get(data[start : start + 2].upper())
    match = form.match(data, start) if form is not None and begins(data, start) else None
    if match is None or not checksums.iban(match[0].translate(None, b" -").upper().decode()):
        return None
    return match.span()
