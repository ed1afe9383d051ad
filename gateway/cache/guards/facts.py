"""Guards of what is stated exactly: numbers, units, money, times, quotations and code."""

from __future__ import annotations

from typing import Final

from gateway.cache.guards import english
from gateway.cache.guards.languages import LEXICONS
from gateway.cache.guards.reading import Reading
from gateway.cache.guards.stems import stem

_TIMES: Final = frozenset(stem(word) for word in english.TIME)


def numbers(asked: Reading, kept: Reading) -> str | None:
    """The same values in the same order: 5 minus 3 is not 3 minus 5."""
    if asked.numbers == kept.numbers:
        return None
    return "order of numbers" if sorted(asked.numbers) == sorted(kept.numbers) else "numbers"


def units(asked: Reading, kept: Reading) -> str | None:
    return "units" if _of(asked, "unit ") != _of(kept, "unit ") else None


def currencies(asked: Reading, kept: Reading) -> str | None:
    return "currencies" if _of(asked, "currency ") != _of(kept, "currency ") else None


def dates(asked: Reading, kept: Reading) -> str | None:
    """Days, months, seasons, spans of time, and words like yesterday."""
    return "words of time" if _times(asked) != _times(kept) else None


def quotes(asked: Reading, kept: Reading) -> str | None:
    return "quoted text" if asked.quotes != kept.quotes else None


def code(asked: Reading, kept: Reading) -> str | None:
    return "code or signs" if asked.codes != kept.codes else None


def _of(reading: Reading, prefix: str) -> set[str]:
    return {word.key for word in reading.words if word.key.startswith(prefix)}


def _times(reading: Reading) -> set[str]:
    if reading.language == "en":
        return {word.key for word in reading.words if word.key in _TIMES} | _of(reading, "time ")
    time = LEXICONS[reading.language].time | LEXICONS[reading.language].now
    return {word.key for word in reading.words if word.form in time}
