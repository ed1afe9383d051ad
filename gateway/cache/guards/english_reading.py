"""An English question, read."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import msgspec

from gateway.cache.guards import english, english_question, numbers, phrases, stems, synonyms
from gateway.cache.guards.english_courtesy import strip
from gateway.cache.guards.literal import MARK
from gateway.cache.guards.reading import BARE, Reading, Word
from gateway.cache.guards.word_lists import in_order, words

_IS: Final = words("what who where when why how that there here it he she which this")
_TAILS: Final = {"re": "are", "ve": "have", "ll": "will", "m": "am", "d": "would"}
_SIGNS: Final = {"%": "percent", "°": "degree"}
_PERSONS: Final = {
    word: person
    for person, group in {
        "I": "i me my mine myself", "you": "you your yours yourself", "we": "we us our ours ourselves",
        "he": "he him his himself", "she": "she her hers herself", "they": "they them their theirs themselves",
    }.items()
    for word in group.split()
}  # fmt: skip
_HEADS: Final = {stems.stem(word): stems.stem(group[0]) for group in synonyms.GROUPS for word in group}
_COMMON: Final = {stems.stem(word): group[0] for group in synonyms.GROUPS for word in group}
_PHRASES: Final = re.compile(
    rf"(?<!\S)(?:{'|'.join(map(re.escape, sorted(phrases.PHRASES, key=len, reverse=True)))})(?!\S)"
)
_ASKING: Final = {word: word for word in in_order("what who where when why how")} | {"which": "what", "whom": "who"}
_BEFORE_ONE: Final = english.AUXILIARY | words("no the which this that each every")
"""Before "one" where it counts nothing."""
_ADDRESSED: Final = re.compile(
    r"\b(?:is|are|was|were|do|does|did|can|could|should|will|would|may|might|must|have|had|about|to|of|with|for"
    r"|from) you\b|"
    r"\byours?\b|\bours?\b|^you\b|\bif you\b"
)
"""You, who are asked, and not just anyone."""
_TO_ME: Final = re.compile("^(?!what|who|when|where|why|how|which|is|are|do|does|did|can|will|should)(\\w+) (?:me|us) ")
_CAPITAL_WORDS: Final = {"US": "usa", "IT": "information-technology", "WHO": "world-health-organization"}
"""Abbreviations that are other words in lower case."""
_TABLES: Final = (
    (english.UNITS, "unit "),
    (english.CURRENCIES, "currency "),
    (english.MONTHS, "time "),
    (english.DAYS, "time "),
)
"""Keys that no stem can be."""


def read_english(
    found: list[str], capitals: frozenset[str], quotes: tuple[str, ...], codes: tuple[str, ...]
) -> Reading:
    text, ask = _asked(found)
    kind, rest = ask.kind, ask.rest
    # A how-to loses its subject on the way, and "how do I ask you" is not "how do you ask me".
    said = _TO_ME.sub(r"\1 ", text if ask.generic else ask.text).split()
    persons = [_PERSONS[word] for word in said if word in _PERSONS]
    if _is_anyone(ask, set(persons)):
        persons = []
    told = ask.text.split()
    modals = {english.MODALS[word] for word in told if word in english.MODALS}
    past = any(word in english.PAST_AUXILIARY for word in told)
    present = any(word in english.PRESENT_AUXILIARY for word in told)
    if ask.generic:
        modals, past, present = set(), False, False
    words, values = _words(rest.split(), capitals)
    if kind in ("how", "howto", "explain") and words and words[-1].key == "work" and len(words) > 1:
        words.pop()
    negations = Counter(
        "not" if word in ("no", "cannot") else word for word in rest.split() if word in english.NEGATION
    )
    return Reading(
        language="en",
        kind=kind,
        asides=Counter(_ASKING[word] for word in rest.split() if word in _ASKING),
        words=tuple(words),
        numbers=tuple(values),
        quotes=quotes,
        codes=codes,
        negations=negations,
        persons=tuple(persons),
        modals=frozenset(modals),
        past=past,
        present=present,
        ties=Counter(),
        names=frozenset(_key(word) for word in capitals),
        embedded=False,
    )


def english_essence(found: list[str]) -> str:
    """The question without courtesies, in the commonest words for it: what its vector is made of."""
    words = _asked(found)[1].text.split()
    out: list[str] = []
    at = 0
    while at < len(words):
        number = None if _no_number(words, at) else numbers.spelled(words, at)
        if number is not None:
            out.append(number[0])
        elif words[at] in ("st", "nd", "rd", "th") and out and out[-1].isdigit():
            out[-1] += "th"
        else:
            out.append(_COMMON.get(stems.stem(words[at]), words[at]))
        at += 1 if number is None else number[1]
    return " ".join(out).replace(" 's", "'s").replace(" ,", ",")


def _asked(found: list[str]) -> tuple[str, english_question.Ask]:
    text = strip(" ".join(_plain_words(found)))
    return text, english_question.ask(_PHRASES.sub(lambda phrase: phrases.PHRASES[phrase.group()], text))


def _is_anyone(ask: english_question.Ask, persons: set[str]) -> bool:
    """Whether who is spoken of makes no difference: how do I, how do you, how does one; can I, is it possible."""
    if ask.generic:
        return len(persons) <= 1 and not persons & {"he", "she"}
    if ask.kind in ("why", "how", "yesno", "what", "explain", "list", "when", "where", "who") and persons == {"we"}:
        return True
    if persons in ({"you"}, {"we"}) and (" when you " in ask.text or not _ADDRESSED.search(ask.text)):
        return True
    return ask.kind == "yesno" and persons == {"I"} and ask.text.startswith(("can ", "should ", "must ", "do i need "))


def _plain_words(found: list[str]) -> list[str]:
    """Lower case, contractions undone, currencies and signs as words, numbers parted from letters."""
    out: list[str] = []
    mixed = not all(token.isupper() for token in found if token[0].isalpha())
    for token in found:
        word = token.lower()
        word = _CAPITAL_WORDS.get(token, BARE.get(word, word)) if mixed else BARE.get(word, word)
        if word in _SIGNS:
            out.append(_SIGNS[word])
        elif "'" in word and word[0].isalpha():
            out.extend(_uncontracted(word))
        else:
            out.append(word)
    return out


def _uncontracted(word: str) -> list[str]:
    base, _, tail = word.rpartition("'")
    if word in ("let's", "c'mon", "o'clock"):
        return ["let", "us"] if word == "let's" else [word.replace("'", "")]
    if tail == "t" and base.endswith("n"):
        stem = {"won": "will", "can": "can", "shan": "shall", "ain": "is"}.get(base, base[:-1])
        return [stem, "not"]
    if tail in _TAILS and base:
        return [*_plain_words([base]), _TAILS[tail]]
    if tail == "s":
        return [base, "is"] if base in _IS else [base, "'s"]
    return [word.replace("'", "")]


def _key(word: str) -> str:
    for table, prefix in _TABLES:
        if word in table:
            return prefix + table[word]
    root = stems.stem(word)
    return _HEADS.get(root, root)


def _words(tokens: list[str], capitals: frozenset[str]) -> tuple[list[Word], list[str]]:
    words: list[Word] = []
    values: list[str] = []
    role, run, group, joined, fresh = "", 0, 0, False, True
    at = 0
    while at < len(tokens):
        token, step = tokens[at], 1
        number = None if _no_number(tokens, at) else numbers.spelled(tokens, at)
        if token[0].isdigit():
            ordinal = at + 1 < len(tokens) and tokens[at + 1] in ("st", "nd", "rd", "th")
            values.append(numbers.digits(token) + ("th" if ordinal else ""))
            step = 2 if ordinal else 1
        elif number is not None:
            value, step = number
            values.append(value)
        elif (value_of := numbers.roman(token)) is not None:
            values.append(str(value_of))
        elif token in numbers.PARTS:
            values.append(f"1/{numbers.PARTS[token]}")
        elif token in numbers.TIMES:
            values.append(numbers.TIMES[token])
        elif token in ("and", "or", "vs", "versus"):
            joined, fresh = bool(words), True
            if token == "or":
                words.append(Word("or", "or", "", -1, -1))
        elif token == ",":
            role, fresh = "", True
        elif token == "'s":
            for index in range(len(words) - 1, -1, -1):
                if words[index].run != run:
                    break
                words[index] = msgspec.structs.replace(words[index], role="poss")
            role, fresh = "", True
        elif token == "from":
            words.append(Word("from", "from", "", -1, -1))
            role, fresh = "from", True
        elif role == "than" and (token in english.TIES or token in english.ARTICLES or token in english.LIGHT):
            fresh = True
        elif token == "to" and at + 1 < len(tokens) and tokens[at + 1] not in english.ARTICLES:
            role, fresh = "to", True
        elif token in english.TIES:
            role, fresh = english.TIES[token], True
        elif token in english.ARTICLES:
            role, fresh = (role if fresh else ""), True
        elif token in english.LIGHT or token in english.NEGATION:
            role, fresh, joined = "", True, False
        else:
            if fresh:
                run += 1
                group = group if joined else run
            fresh, joined = False, False
            words.append(Word(token, token if token.startswith(MARK) else _key(token), role, run, group))
        at += step
    return words, values


def _no_number(tokens: list[str], at: int) -> bool:
    """Whether "one" and "second" are no numbers here."""
    before = tokens[at - 1] if at else ""
    after = tokens[at + 1] if at + 1 < len(tokens) else ""
    if tokens[at] == "one":
        return not after or after in english.LIGHT or before in _BEFORE_ONE
    if tokens[at] in ("second", "seconds"):
        return before[:1].isdigit() or before in numbers.SMALL or before in ("per", "a", "each", "every")
    return False
