"""Whether two questions that look alike may share an answer. Each guard has one fear, and any of them is a miss.

The nearness of two vectors says that two texts speak of the same things, and hardly whether they say the same: "safe"
and "not safe" lie closer than most paraphrases do. What follows reads both texts, in the languages that it knows, and
finds a difference that may change the answer. When in doubt there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from gateway.cache.guards import asking, english, facts, wording
from gateway.cache.guards.english_reading import english_essence, read_english
from gateway.cache.guards.foreign_reading import foreign_essence, read_foreign
from gateway.cache.guards.languages import LEXICONS, fold
from gateway.cache.guards.literal import part, restored
from gateway.cache.guards.reading import Reading, capitals, language_of, tokens
from gateway.cache.guards.word_lists import in_order

__all__ = in_order("GUARDS Guard Rejection check essence readable speaks_of_now")

Guard = Callable[[Reading, Reading], str | None]
"""What differs, as a kind of word and never the word itself; None if nothing of this guard's does."""


class Rejection(msgspec.Struct, frozen=True):
    guard: str
    detail: str


GUARDS: Final[dict[str, Guard]] = {
    "language": asking.language,
    "quotes": facts.quotes,
    "code": facts.code,
    "numbers": facts.numbers,
    "units": facts.units,
    "currencies": facts.currencies,
    "dates": facts.dates,
    "negation": wording.negation,
    "wanted_language": wording.wanted_language,
    "wanted_form": wording.wanted_form,
    "direction": wording.direction,
    "names": wording.names,
    "content_words": wording.content_words,
    "question_type": asking.question_type,
    "person": asking.person,
    "tense": asking.tense,
    "order": wording.order,
}
"""In the order in which they are asked: the first to object is named in the log."""


def check(asked: str, kept: str) -> Rejection | None:
    """What keeps an answer to ``kept`` from answering ``asked``; None if they ask for the same."""
    if asked == kept:
        return None
    ours, theirs = _read(asked), _read(kept)
    if ours is None or theirs is None:
        return Rejection("language", "not readable")
    for name, guard in GUARDS.items():
        if detail := guard(ours, theirs):
            return Rejection(name, detail)
    return None


def essence(text: str) -> str:
    """What a vector should be made of: the question without courtesies, in common words. The text itself where the
    guards cannot read it."""
    language = language_of(text)
    if language is None:
        return text
    plain, quotes, codes = part(text)
    found = tokens(plain)
    short = english_essence(found) if language == "en" else foreign_essence(language, found)
    return restored(short, quotes, codes)


def readable(text: str) -> bool:
    """Whether the guards know the script and the language; if not, only the same text may be answered from
    the cache."""
    return language_of(text) is not None


def speaks_of_now(text: str) -> bool:
    """Whether the answer may be another one tomorrow, by the words used; in any language that the guards know."""
    found = {fold(word.lower()) for word in _WORD.findall(text)}
    language = language_of(text)
    if language is None:
        return bool(found & _NOW)
    return bool(found & (english.NOW if language == "en" else LEXICONS[language].now))


_WORD: Final = re.compile(r"[^\W\d_]+")
_NOW: Final = english.NOW.union(*(lexicon.now for lexicon in LEXICONS.values()))


@lru_cache(maxsize=32)  # few, for they hold what people ask
def _read(text: str) -> Reading | None:
    language = language_of(text)
    if language is None:
        return None
    plain, quotes, codes = part(text)
    found = tokens(plain)
    if language == "en":
        return read_english(found, capitals(found), quotes, codes)
    return read_foreign(language, found, capitals(found), quotes, codes)
