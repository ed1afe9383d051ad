"""A question in German, French, Spanish, Italian, Portuguese or Dutch, read."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from gateway.cache.guards import english, numbers
from gateway.cache.guards.languages import LEXICONS, fold
from gateway.cache.guards.literal import MARK
from gateway.cache.guards.reading import Reading, Word
from gateway.cache.guards.word_lists import words as word_set

_PERSONS: Final = {
    "de": "ich:I mich:I mir:I mein:I meine:I meinen:I meinem:I meiner:I du:you dich:you dir:you dein:you deine:you "
    "deinen:you er:he ihm:he ihn:he sein:he seine:he seinen:he seiner:he sie:sie ihr:sie ihre:sie ihren:sie ihrer:sie "
    "wir:we uns:we unser:we unsere:we",
    "fr": "je:I j:I me:I m:I moi:I mon:I ma:I mes:I tu:you te:you t:you toi:you ton:you ta:you tes:you vous:you "
    "votre:you il:he lui:he elle:she nous:we notre:we ils:they elles:they leur:they",
    "es": "yo:I mi:I mis:I me:I tu:you tus:you te:you usted:you su:his sus:his ella:she nosotros:we ellos:they",
    "it": "io:I mi:I mio:I mia:I tu:you ti:you tuo:you tua:you lui:he lei:she suo:his sua:his noi:we loro:they",
    "pt": "eu:I me:I meu:I minha:I tu:you voce:you seu:you sua:you ele:he ela:she dele:he dela:she eles:they",
    "nl": "ik:I mijn:I mij:I me:I jij:you je:you jou:you jouw:you u:you uw:you hij:he hem:he zij:she ze:she haar:she "
    "wij:we we:we ons:we onze:we hun:they hen:they",
}
_MODALS: Final = {
    "de": "kann:can kannst:can konnen:can könnte:can können:can soll:should sollte:should sollen:should muss:must "
    "müssen:must darf:may dürfen:may will:want möchte:want",
    "fr": "peut:can peux:can puis:can peuvent:can dois:must doit:must faut:must devrais:should veux:want veut:want",
    "es": "puedo:can puede:can puedes:can pueden:can debo:must debe:must deberia:should quiero:want",
    "it": "posso:can puo:can puoi:can devo:must deve:must dovrei:should voglio:want",
    "pt": "posso:can pode:can podem:can devo:must deve:must deveria:should quero:want",
    "nl": "kan:can kun:can kunt:can kunnen:can moet:must moeten:must mag:may mogen:may zou:should wil:want",
}
_PAST: Final = {
    "de": "war waren wurde wurden hatte hatten",
    "fr": "était étaient fut furent avait avaient",
    "es": "fue era eran fueron había fui",
    "it": "era erano fu furono aveva",
    "pt": "foi era eram foram tinha fui",
    "nl": "was waren werd werden had hadden",
}
_TIES: Final = {
    "de": "für mit bei auf zu zum zur",
    "fr": "à au aux pour par avec sur",
    "es": "a al para por con",
    "it": "a al alla ai agli per con su sul sulla",
    "pt": "a ao à aos às para por pelo pela com",
    "nl": "voor met bij op aan",
}
"""Prepositions that hold a phrase in its place, written with their accents; those for "of" and "in" change freely."""
_PERSON_OF: Final = {language: dict(pair.split(":") for pair in pairs.split()) for language, pairs in _PERSONS.items()}
_MODAL_OF: Final = {language: dict(pair.split(":") for pair in pairs.split()) for language, pairs in _MODALS.items()}
_PLAIN_ASKING: Final = word_set("who whom where when why count")
"""Kinds whose words hardly join clauses."""
_INVERTED: Final = frozenset(("est", "sont", "a", "t", "fait", "y", "qu", "sera", "etait"))
"""After which French "il" and "elle" speak of nobody."""
_UNITS: Final = {fold(form): f"unit {unit}" for form, unit in english.UNITS.items()} | {
    fold(form): f"currency {unit}" for form, unit in english.CURRENCIES.items()
}


def read_foreign(
    language: str, found: list[str], capitals: frozenset[str], quotes: tuple[str, ...], codes: tuple[str, ...]
) -> Reading:
    lexicon = LEXICONS[language]
    whole = _plain(found)
    text = _stripped(language, found)
    folded = [fold(word) for word in text.replace("'", " ").split()]
    kind, begin = _kind(folded, lexicon.asks)
    rest = folded[begin:]
    words: list[Word] = []
    values: list[str] = []
    for word in rest:
        if word == ",":
            continue
        number = numbers.FOREIGN[language].get(word)
        if word[0].isdigit():
            values.append(numbers.digits(word))
        elif number is not None:
            values.append(str(number))
        elif (value := numbers.roman(word)) is not None:
            values.append(str(value))
        elif word in lexicon.direction or (word not in lexicon.light and word not in lexicon.negation):
            key = word if word.startswith(MARK) else lexicon.alike.get(word) or _UNITS.get(word)
            words.append(Word(word, key or lexicon.endings.sub("", word), "", len(words), len(words)))
    past = {fold(word) for word in _PAST[language].split()} & set(folded)
    ties = _TIES[language].split()
    persons = [
        _PERSON_OF[language][word]
        for before, word, after in zip(["", *rest], rest, [*rest[1:], ""], strict=False)
        if word in _PERSON_OF[language]
        and not (word in ("il", "elle") and (before in _INVERTED or after in ("y", "faut", "est")))
    ]
    if kind == "how" and len(set(persons)) <= 1 and not set(persons) & {"he", "she"}:
        persons = []
    return Reading(
        language=language,
        kind=kind,
        asides=Counter(
            lexicon.asks[word] for word in rest if len(word) > 2 and lexicon.asks.get(word) in _PLAIN_ASKING
        ),
        words=tuple(words),
        numbers=tuple(values),
        quotes=quotes,
        codes=codes,
        negations=Counter(word for word in rest if word in lexicon.negation),
        persons=tuple(persons),
        modals=frozenset()
        if kind == "how"
        else frozenset(_MODAL_OF[language][word] for word in folded if word in _MODAL_OF[language]),
        past=bool(past),
        present=not past,
        ties=Counter(word for word in text.split() if word in ties),
        names=frozenset(lexicon.endings.sub("", fold(word)) for word in capitals) if language != "de" else frozenset(),
        embedded=whole != text or any(word in lexicon.modal for word in rest),
    )


def foreign_essence(language: str, found: list[str]) -> str:
    """The kind of question and the words that it hangs on, sorted: small models know little of a foreign sentence."""
    reading = read_foreign(language, found, frozenset(), (), ())
    told = (*sorted(reading.negations), *sorted(word.key for word in reading.words), *reading.numbers)
    return " ".join((reading.kind, *told))


def _stripped(language: str, found: list[str]) -> str:
    """The question without courtesies."""
    text = _plain(found)
    for _ in range(6):
        shorter = LEXICONS[language].polite.sub("", _joined(text), count=1).strip(" ,")
        if not shorter or shorter == text:
            break
        text = shorter
    return text


def _plain(found: list[str]) -> str:
    text = re.sub(r" ?' ?", "' ", " ".join(token.lower() for token in found))
    return " ".join(word.rstrip("'") for word in text.split())


def _joined(text: str) -> str:
    """With the apostrophes and hyphens that courtesies are written with."""
    return re.sub(r"\bs il\b", "s'il", text)


def _kind(words: list[str], asks: object) -> tuple[str, int]:
    assert isinstance(asks, dict)
    joined = " ".join(words).replace("-", " ")
    for phrase in sorted(asks, key=len, reverse=True):
        plain = phrase.replace("-", " ")
        if joined == plain or joined.startswith(plain + " "):
            return asks[phrase], len(plain.split())
    for at, word in enumerate(words[:8]):
        if word in asks and asks[word] not in ("explain", "list", "give") and len(word) > 2:
            before = "".join(f"{first} " for first in words[:at] if at == 1)
            return before + asks[word], 0
    return "do", 0
