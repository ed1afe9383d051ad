"""Numbers by which states know persons. Each is a pattern and what its number must satisfy; more are easily added."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.redaction import checksums
from gateway.redaction.spans import ALNUM, Span, compiled, found, stands_alone

KIND: Final = "NATIONAL_ID"
_BEFORE: Final = 48
"""Bytes before a number in which a word may say what it is."""


_OF_PHONE = re.compile(rb"\+[0-9 ().-]{0,7}$")
"""What stands before a number that is the rest of a phone's."""


@dataclass(frozen=True, eq=False)
class NationalId:
    name: str
    pattern: str
    """RE2's syntax, without groups that capture."""
    check: Callable[[str], bool]
    """Of the number's capitals and digits."""
    words: str | None = None
    """Pattern of words of which one must stand before it: for numbers that look like any other."""
    finder: Any = field(init=False, repr=False)
    told_by: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "finder", compiled(rf"\b(?:{self.pattern})\b"))
        if self.words is not None:
            object.__setattr__(self, "told_by", compiled(f"(?i){self.words}"))

    def find(self, data: bytes) -> Iterator[Span]:
        if self.told_by is None or self.told_by.search(data) is not None:
            for place in found(self.finder, data, self._confirmed):
                yield Span(*place, KIND)

    def _confirmed(self, data: bytes, start: int, end: int) -> tuple[int, int] | None:
        if not stands_alone(data, start, end) or _OF_PHONE.search(data, max(start - 8, 0), start):
            return None
        text = bytes(byte for byte in data[start:end] if byte in ALNUM).upper().decode()
        if not self.check(text):
            return None
        if self.told_by is not None and self.told_by.search(data, max(start - _BEFORE, 0), start) is None:
            return None
        return start, end


NATIONAL_IDS: Final = (
    NationalId("us_ssn", r"[0-9]{3}-[0-9]{2}-[0-9]{4}|[0-9]{3} [0-9]{2} [0-9]{4}", checksums.ssn),
    NationalId("us_ssn_bare", r"[0-9]{9}", checksums.ssn, words=r"\bssn\b|social security"),
    NationalId("de_steuer_id", r"[1-9][0-9]{10}|[1-9][0-9] [0-9]{3} [0-9]{3} [0-9]{3}", checksums.steuer_id),
    NationalId("es_dni", r"(?i:[0-9]{8}[ -]?[a-z]|[xyz][ -]?[0-9]{7}[ -]?[a-z])", checksums.dni),
    NationalId(
        "it_codice_fiscale",
        r"(?i:[a-z]{6}[0-9]{2}[abcdehlmprst][0-9l-v]{2}[a-z][0-9l-v]{3}[a-z])",
        checksums.codice_fiscale,
    ),
    NationalId(
        "fr_nir",
        r"[1-478] ?[0-9]{2} ?[0-9]{2} ?(?:[0-9]{2}|2[ABab]) ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}",
        checksums.nir,
    ),
    NationalId("nl_bsn", r"[0-9]{9}|[0-9]{4}\.[0-9]{2}\.[0-9]{3}", checksums.bsn, words=r"\bbsn\b|burgerservice|sofi"),
    NationalId("gb_nino", r"[A-Z]{2} ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D]", checksums.nino),
    NationalId("in_aadhaar", r"[2-9][0-9]{3} [0-9]{4} [0-9]{4}", checksums.verhoeff),
    NationalId("in_aadhaar_bare", r"[2-9][0-9]{11}", checksums.verhoeff, words=r"aadha?ar|uidai"),
    NationalId("br_cpf", r"[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}|[0-9]{11}", checksums.cpf),
)
_OF_LETTERS: Final = tuple(each for each in NATIONAL_IDS if each.name in ("it_codice_fiscale", "gb_nino"))
_OF_DIGITS: Final = tuple(each for each in NATIONAL_IDS if each.name not in ("it_codice_fiscale", "gb_nino"))
_ANY_OF_DIGITS = compiled(rf"\b(?:{'|'.join(each.pattern for each in _OF_DIGITS)})\b")
MARKS: Final = tuple(f"(?:{each.pattern})" for each in _OF_LETTERS)
"""Patterns of those that may have fewer than six digits in a row."""


def of_digits(data: bytes) -> Iterator[Span]:
    if _ANY_OF_DIGITS.search(data) is not None:
        for each in _OF_DIGITS:
            yield from each.find(data)


def with_letters(data: bytes) -> Iterator[Span]:
    for each in _OF_LETTERS:
        yield from each.find(data)
