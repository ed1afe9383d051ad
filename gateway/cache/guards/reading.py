"""A question as the guards look at it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import msgspec

from gateway.cache.guards import numbers
from gateway.cache.guards.languages import LEXICONS, LIGHT, STRANGERS, fold
from gateway.cache.guards.literal import MARK, part
from gateway.cache.guards.word_lists import in_order, words

LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzäöüßéèêëàâîïôûùçœæáíóúñìòãõª º".replace(" ", ""))
_TOKEN: Final = re.compile(
    rf"{MARK}[qc]\d+{MARK}|{numbers.DIGITS.pattern}|[^\W\d_]+(?:'[^\W\d_]+)*'?|[$€£¥₹₩¢₽₺%°]|[,.;:!?…\n()/]|-"
)
MOST_CHARACTERS: Final = 2000
"""Longer texts are not read: hardly two of them say the same."""
_HINTS: Final = (
    ("¿¡ñ", ("es",)),
    ("ãõ", ("pt",)),
    ("äöüß", ("de",)),
    ("œûîù", ("fr",)),
    ("ìò", ("it",)),
    ("áíóú", ("es", "pt")),
)
"""Letters and signs -> languages that they speak for, where the words leave it open."""
_STOPS: Final = frozenset(",.;:!?…\n()")
BARE: Final = {
    word.replace("'", ""): word
    for word in in_order(
        """don't doesn't didn't isn't aren't wasn't weren't can't couldn't shouldn't wouldn't won't hasn't haven't
        what's
    who's where's how's i'm i've you're they're that's there's"""
    )
}
_IMPERATIVES: Final = words(
    """explain describe list name give tell write define summarize summarise draft suggest recommend translate convert
    show compare calculate solve draw create make find help say correct fix rewrite answer return tips best flights
    what"""
)


class Word(msgspec.Struct, frozen=True):
    form: str
    """Lower case, as written."""
    key: str
    """What words of one meaning share."""
    role: str
    """How its phrase is tied on, as in ``english.TIES``; "from", "poss", and "" for subjects, verbs, objects."""
    run: int
    """Words with nothing light between them share it."""
    group: int
    """Runs that "and" or "or" joins share it."""


class Reading(msgspec.Struct, frozen=True):
    language: str
    kind: str
    asides: Counter[str]
    """Words that ask, beyond the first."""
    words: tuple[Word, ...]
    """Numbers, quotations and light words left out."""
    numbers: tuple[str, ...]
    quotes: tuple[str, ...]
    codes: tuple[str, ...]
    negations: Counter[str]
    persons: tuple[str, ...]
    modals: frozenset[str]
    past: bool
    present: bool
    ties: Counter[str]
    """Prepositions, where words do not tell how they are tied on."""
    names: frozenset[str]
    """Keys of words that stand with a capital inside a sentence."""
    embedded: bool
    """The verb may stand at the end (German, Dutch)."""


def tokens(text: str) -> list[str]:
    """With their capitals; quotations and code as marks; stops as commas."""
    out: list[str] = []
    for token in _TOKEN.findall(text):
        if token in _STOPS:
            token = ","
        if token == "-" or (token == "," and (not out or out[-1] == ",")):
            continue
        out.append(token.rstrip("'") if token[0].isalpha() else token)
    while out and out[-1] == ",":
        out.pop()
    return out


def language_of(text: str) -> str | None:
    """de, en, es, fr, it, nl or pt; None for a script, a language or a mixture that the guards don't know."""
    if len(text) > MOST_CHARACTERS:
        return None
    plain = part(text)[0]
    raw = [word for token in tokens(plain) if token[0].isalpha() for word in token.lower().split("'")]
    if any(char.isalpha() and char not in LETTERS for word in raw for char in word):
        return None
    found = [fold(word) for word in raw if word]
    if not found:
        return None
    scores: dict[str, float] = {name: sum(word in light for word in found) for name, light in LIGHT.items()}
    scores["en"] += sum(word in _IMPERATIVES or word in BARE for word in found)
    for name, lexicon in LEXICONS.items():
        scores[name] += sum(word in lexicon.direction or word in lexicon.asks for word in found) * 0.5
        scores[name] += sum(lexicon.asks.get(word) in ("explain", "list") for word in found) * 0.5
    by_words = dict(scores)
    known = {name for name, score in scores.items() if score >= 1}
    for letters, names in _HINTS:
        if any(char in letters for char in text.lower()):
            for name in known.intersection(names):
                scores[name] += 1
    best = max(scores, key=lambda name: scores[name])
    if scores[best] < 1 or scores[best] < 0.15 * len(found):
        return None
    strange = sum(word in STRANGERS and word not in LIGHT[best] for word in found)
    if strange and strange >= scores[best] * 0.6:
        return None
    for name, light in LIGHT.items():
        if name != best and sum(word in light and word not in LIGHT[best] for word in found) >= max(
            3, by_words[best] * 0.7
        ):
            return None
    return best


def capitals(found: list[str]) -> frozenset[str]:
    words = [word for word in found if word[0].isalpha()]
    if sum(word.isupper() for word in words) > len(words) / 2:
        return frozenset()
    return frozenset(
        word.lower().removesuffix("'s")
        for at, word in enumerate(found)
        if word[0].isupper() and word != "I" and at and found[at - 1] != ","
    )
