"""Numbers in a text, however written, as exact values in their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gateway.cache.guards.word_lists import in_order

_ENGLISH_ONES: Final = in_order(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen"""
)
_ENGLISH_TENS: Final = dict(
    zip(in_order("twenty thirty forty fifty sixty seventy eighty ninety"), range(20, 100, 10), strict=True)
)
_ORDINALS: Final = in_order(
    """zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
    fifteenth sixteenth seventeenth eighteenth nineteenth"""
)
SMALL: Final[dict[str, int]] = (
    {word: value for value, word in enumerate(_ENGLISH_ONES)} | _ENGLISH_TENS | {"fourty": 40, "dozen": 12}
)
ORDINAL: Final[dict[str, int]] = (
    {word: value for value, word in enumerate(_ORDINALS)}
    | {word[:-1] + "ieth": value for word, value in _ENGLISH_TENS.items()}
    | {"hundredth": 100, "thousandth": 1000}
)
SCALE: Final = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "hundreds": 100,
    "thousands": 1000,
    "millions": 10**6,
    "billions": 10**9,
}
PARTS: Final = {
    "half": 2,
    "halves": 2,
    "quarter": 4,
    "quarters": 4,
    "thirds": 3,
    "fifths": 5,
    "tenths": 10,
    "eighths": 8,
}
TIMES: Final = {
    "once": "1x",
    "twice": "2x",
    "thrice": "3x",
    "double": "2x",
    "triple": "3x",
    "single": "1",
    "couple": "2",
}

_OTHERS: Final[dict[str, tuple[str, ...]]] = {
    "de": (
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn zwanzig",
        "dreißig 30 vierzig 40 fünfzig 50 sechzig 60 siebzig 70 achtzig 80 neunzig 90 hundert 100 tausend 1000 "
        "million 1000000 millionen 1000000",
    ),
    "fr": (
        "zéro - deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
        "dix-huit dix-neuf vingt",
        "trente 30 quarante 40 cinquante 50 soixante 60 cent 100 mille 1000 million 1000000 millions 1000000",
    ),
    "es": (
        "cero - dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete "
        "dieciocho diecinueve veinte",
        "treinta 30 cuarenta 40 cincuenta 50 sesenta 60 setenta 70 ochenta 80 noventa 90 cien 100 mil 1000 "
        "millón 1000000 millones 1000000",
    ),
    "it": (
        "zero - due tre quattro cinque sei sette otto nove dieci undici dodici tredici quattordici quindici sedici "
        "diciassette diciotto diciannove venti",
        "trenta 30 quaranta 40 cinquanta 50 sessanta 60 settanta 70 ottanta 80 novanta 90 cento 100 mille 1000 "
        "milione 1000000 milioni 1000000",
    ),
    "pt": (
        "zero - dois três quatro cinco seis sete oito nove dez onze doze treze catorze quinze dezesseis dezessete "
        "dezoito dezenove vinte",
        "duas 2 trinta 30 quarenta 40 cinquenta 50 sessenta 60 setenta 70 oitenta 80 noventa 90 cem 100 mil 1000 "
        "milhão 1000000 milhões 1000000",
    ),
    "nl": (
        "nul - twee drie vier vijf zes zeven acht negen tien elf twaalf dertien veertien vijftien zestien zeventien "
        "achttien negentien twintig",
        "dertig 30 veertig 40 vijftig 50 zestig 60 zeventig 70 tachtig 80 negentig 90 honderd 100 duizend 1000 "
        "miljoen 1000000",
    ),
}
FOREIGN: Final[dict[str, dict[str, int]]] = {
    language: {word: value for value, word in enumerate(ones.split()) if word != "-"}
    | dict(zip(more.split()[::2], map(int, more.split()[1::2]), strict=True))
    for language, (ones, more) in _OTHERS.items()
}

DIGITS: Final = re.compile(r"\d+(?:[.,:/\-]\d+)*")
_ROMAN: Final = re.compile("x{0,3}(?:ix|iv|v?i{0,3})")
_ROMAN_VALUES: Final = {"i": 1, "v": 5, "x": 10}


def digits(text: str) -> str:
    """``1,000`` and ``1000`` alike, ``3.50`` and ``3.5``; what is no plain number (a date, a version) as it stands."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        whole, _, fraction = text.partition(".")
        fraction = fraction.rstrip("0") if len(fraction) != 1 else fraction
        # 3.1 and 3.10 are two versions, and one number: kept apart, a miss at worst.
        return (whole.lstrip("0") or "0") + ("." + text.partition(".")[2] if fraction else "")
    return text


def roman(word: str) -> int | None:
    """The value of a numeral up to 39 of two letters or more; None for anything else."""
    if len(word) < 2 or word in ("mi", "di", "xi") or not _ROMAN.fullmatch(word):
        return None
    values = [_ROMAN_VALUES[letter] for letter in word]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0], strict=True))


def spelled(words: Sequence[str], at: int) -> tuple[str, int] | None:
    """The number in words that begins at ``at``, and how many words it takes; None if none begins there."""
    total, current, index, ordinal = 0, 0, at, False
    while index < len(words) and not ordinal:
        word = words[index]
        if word in SMALL:
            value = SMALL[word]
            if current % 100 and not (current % 100 >= 20 and current % 10 == 0 and value < 10) and current % 100:
                break
            current += value
        elif word in ORDINAL and not (word == "second" and index > at and current % 10):
            if current % 10 or (current and ORDINAL[word] >= 10 and current % 100):
                break
            current, ordinal = current + ORDINAL[word], True
        elif word in SCALE:
            scale = SCALE[word]
            if scale == 100:
                current = (current or 1) * 100
            else:
                total, current = total + (current or 1) * scale, 0
        elif word == "and" and index > at and words[index - 1] in SCALE and _goes_on(words, index + 1):
            pass
        else:
            break
        index += 1
    if index == at:
        return None
    return f"{total + current}{'th' if ordinal else ''}", index - at


def _goes_on(words: Sequence[str], at: int) -> bool:
    return at < len(words) and (words[at] in SMALL or words[at] in ORDINAL)
