"""Guards of the words that carry the meaning, and of their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Final

from gateway.cache.guards import english
from gateway.cache.guards.languages import LEXICONS
from gateway.cache.guards.reading import Reading, Word
from gateway.cache.guards.stems import stem
from gateway.cache.guards.word_lists import in_order

_DIRECTION: Final = frozenset(stem(word) for word in english.DIRECTION)
_FORM: Final = frozenset(stem(word) for word in english.FORM)
_PREFIXES: Final = tuple(sorted(english.NEGATING_PREFIXES, key=len, reverse=True))
_SUPERLATIVE_SCOPE: Final = frozenset(("world", "ever"))
_REASONED: Final = frozenset(stem(word) for word in ("difference", "reason", "advantage", "disadvantage", "symptom"))
"""Of which one tells the main ones, asked or not."""
_MANNER: Final = frozenset(("brief", "detail", "simpl", "stepwis"))
"""Words that say how to answer, wherever they stand."""
_LONG: Final = 9
_REAL_PAIRS: Final = frozenset(
    frozenset(pair.split("/"))
    for pair in in_order(
        """marital/martial complaint/compliant desert/dessert immorality/immortality underserved/undeserved
    interstate/intestate perform/preform cavalry/calvary"""
    )
)


def negation(asked: Reading, kept: Reading) -> str | None:
    if asked.negations != kept.negations:
        return "words of negation"
    ours, theirs = _differing(asked, kept)
    if any(_negates(one, other) or _negates(other, one) for one in ours for other in theirs):
        return "a negating prefix"
    return "words of negation" if {"lack", "fre", "dislike"} & (ours | theirs) else None


def direction(asked: Reading, kept: Reading) -> str | None:
    """Before and after, more and less, buy and sell, from and to."""
    ours, theirs = _differing(asked, kept)
    known = _DIRECTION if asked.language == "en" else LEXICONS[asked.language].direction
    return "words of direction or comparison" if (ours | theirs) & known else None


def wanted_language(asked: Reading, kept: Reading) -> str | None:
    ours, theirs = _differing(asked, kept)
    return "names of languages" if (ours | theirs) & english.LANGUAGES else None


def wanted_form(asked: Reading, kept: Reading) -> str | None:
    ours, theirs = _differing(asked, kept)
    return "form of the answer" if (ours | theirs) & _FORM else None


def names(asked: Reading, kept: Reading) -> str | None:
    """Words with a capital inside a sentence; others are content words."""
    ours, theirs = _differing(asked, kept)
    return "names" if (ours & asked.names) or (theirs & kept.names) else None


def content_words(asked: Reading, kept: Reading) -> str | None:
    ours, theirs = _differing(asked, kept)
    return f"{len(ours)} and {len(theirs)} content words" if ours or theirs else None


def order(asked: Reading, kept: Reading) -> str | None:
    """Who does what to whom. Phrases of place and means may move; what is alone on its side of a verb may not."""
    ours, theirs = _single(asked), _single(kept)
    if asked.language != "en":
        if asked.ties != kept.ties:
            return "how words are tied together"
        return None if _same_order(asked, kept) else "order of words"
    shared = [key for key in ours if key in theirs and key not in _MANNER]
    if any(not _same_tie(ours[key][1], theirs[key][1]) for key in shared):
        return "how words are tied together"
    for one, other in combinations(shared, 2):
        if (ours[one][0] < ours[other][0]) == (theirs[one][0] < theirs[other][0]):
            continue
        first, second = (ours[one][1], theirs[one][1]), (ours[other][1], theirs[other][1])
        together = all(a.run == b.run for a, b in zip(first, second, strict=True))
        joined = all(a.group == b.group >= 0 and a.run != b.run for a, b in zip(first, second, strict=True))
        moved = not together and (_moves(first, second) or _moves(second, first))
        if len(asked.numbers) > 1 or not (moved or (joined and not asked.numbers and "respectively" not in shared)):
            return "order of words"
    return None


def _differing(asked: Reading, kept: Reading) -> tuple[set[str], set[str]]:
    """Keys that one side alone has, without those that say nothing beside the rest."""
    count, other_count = (Counter(word.key for word in reading.words) for reading in (asked, kept))
    ours, theirs = set(count), set(other_count)
    left, right = set(count - other_count), set(other_count - count)
    if asked.language == "en":
        shared = ours & theirs
        if any(key.endswith("est") or key in ("most", "least") for key in shared):
            left, right = left - _SUPERLATIVE_SCOPE, right - _SUPERLATIVE_SCOPE
        if _REASONED & shared:
            left, right = left - {"main"}, right - {"main"}
        if "capital" in shared:
            left, right = left - {"citi"}, right - {"citi"}
    if len(left) == len(right):
        for one in sorted(left):
            for other in sorted(right):
                if one in left and other in right and _typo(one, other, asked.names | kept.names):
                    left, right = left - {one}, right - {other}
    return left, right


def _negates(longer: str, shorter: str) -> bool:
    return any(longer == prefix + shorter for prefix in _PREFIXES)


def _typo(one: str, other: str, names: Iterable[str]) -> bool:
    """Whether two long words differ by swapped neighbours, a doubled letter, or a letter left out inside."""
    if one in names or other in names or frozenset((one, other)) in _REAL_PAIRS or not (one + other).isalpha():
        return False
    if one[:2] != other[:2] or one[-2:] != other[-2:]:
        return False
    if len(one) == len(other) >= 7:
        at = [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        return len(at) == 2 and at[1] == at[0] + 1 and one[at[0]] == other[at[1]] and one[at[1]] == other[at[0]]
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    if len(longer) != len(shorter) + 1:
        return False
    cut = next((index for index, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), len(shorter))
    if longer[:cut] + longer[cut + 1 :] != shorter:
        return False
    doubled = longer[cut] in (longer[cut - 1], longer[min(cut + 1, len(longer) - 1)])
    return len(longer) >= (8 if doubled else _LONG)


def _single(reading: Reading) -> dict[str, tuple[int, Word]]:
    """Key -> place and word, of those that stand once."""
    count = Counter(word.key for word in reading.words)
    return {word.key: (at, word) for at, word in enumerate(reading.words) if count[word.key] == 1}


def _same_tie(one: Word, other: Word) -> bool:
    pair = frozenset((one.role, other.role))
    if len(pair) == 1 or pair in english.ALIKE_TIES:
        return True
    return ("" in pair and pair <= english.MOVABLE | {"", "to"}) or pair == {"goal", "to"}


def _moves(word: tuple[Word, Word], beside: tuple[Word, Word]) -> bool:
    """Whether ``word`` stands in a phrase that may move past ``beside``, which stays tied as it was."""
    ours, theirs = word[0].role, word[1].role
    tied = ours == theirs != "" or (ours in english.MOVABLE or theirs in english.MOVABLE)
    return tied and beside[0].role == beside[1].role


def _same_order(asked: Reading, kept: Reading) -> bool:
    ours, theirs = _single(asked), _single(kept)
    one = [key for key in sorted(ours, key=lambda key: ours[key][0]) if key in theirs]
    other = [key for key in sorted(theirs, key=lambda key: theirs[key][0]) if key in ours]
    if one == other or not one:
        return True
    if asked.language not in ("de", "nl") or not (asked.embedded or kept.embedded):
        return False
    return (one[1:] == other[:-1] and one[0] == other[-1]) or (other[1:] == one[:-1] and other[0] == one[-1])
