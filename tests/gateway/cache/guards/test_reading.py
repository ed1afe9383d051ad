"""What is read in a text: its language, its words of time, its numbers, stems, and what its vector is made of."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache.guards import essence, readable, speaks_of_now
from gateway.cache.guards.numbers import digits, roman, spelled
from gateway.cache.guards.phrases import PHRASES
from gateway.cache.guards.reading import MOST_CHARACTERS, language_of
from gateway.cache.guards.stems import stem
from gateway.cache.guards.synonyms import GROUPS


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "What is the capital of France?"),
        ("en", "explain recursion"),
        ("de", "Was ist die Hauptstadt von Frankreich?"),
        ("fr", "Quelle est la capitale de la France ?"),
        ("es", "¿Cuál es la capital de Francia?"),
        ("it", "Qual è la capitale della Francia?"),
        ("pt", "Qual é a capital da França?"),
        ("nl", "Wat is de hoofdstad van Frankrijk?"),
        (None, "Jaka jest stolica Francji?"),
        (None, "Vad heter huvudstaden i Frankrike?"),
        (None, "Hvad er hovedstaden i Frankrig?"),
        (None, "Fransa'nın başkenti neresidir?"),
        (None, "Thủ đô của Pháp là gì?"),
        (None, "Какая столица Франции?"),
        (None, "フランスの首都は?"),
        (None, "ما هي عاصمة فرنسا؟"),
        (None, "¿Cuál es la capital de Francia? What is the capital of France?"),
        (None, "photosynthesis"),
        (None, ""),
        (None, "🙂 123"),
    ],
)
def test_languages_are_told_apart_and_unknown_ones_not_read(language: str | None, text: str) -> None:
    assert language_of(text) == language
    assert readable(text) == (language is not None)


def test_long_texts_are_not_read() -> None:
    assert readable("What is it? " * (MOST_CHARACTERS // 12))
    assert not readable("What is it? " * (MOST_CHARACTERS // 12 + 1))


@pytest.mark.parametrize(
    "text",
    [
        "What's the weather today?",
        "Who is the CURRENT champion?",
        "the latest news",
        "Wie ist das Wetter heute?",
        "Quel temps fait-il demain ?",
        "¿Qué tiempo hace hoy?",
        "Che tempo fa oggi?",
        "Como está o tempo hoje?",
        "Wat voor weer is het vandaag?",
        "today",
        "tell me more " * 1000 + "about today",
    ],
)
def test_the_present_is_noticed(text: str) -> None:
    assert speaks_of_now(text)


@pytest.mark.parametrize("text", ["Who won in 1998?", "Was ist ein Morgenmantel?", "the yesteryear", ""])
def test_other_times_are_not_the_present(text: str) -> None:
    assert not speaks_of_now(text)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("five", "5"),
        ("twenty one", "21"),
        ("two hundred and five", "205"),
        ("three million two hundred thousand", "3200000"),
        ("a hundred", None),
        ("hundred", "100"),
        ("third", "3th"),
        ("twenty second", "22th"),
        ("nineteen", "19"),
    ],
)
def test_numbers_in_words(words: str, value: str | None) -> None:
    found = spelled(words.split(), 0)
    assert (found and found[0]) == value
    assert found is None or found[1] == len(words.split())


def test_numbers_that_follow_one_another_stay_apart() -> None:
    words = ["five", "six"]
    assert spelled(words, 0) == ("5", 1)
    assert spelled(["nineteen", "eighty"], 0) == ("19", 1)


@given(st.integers(0, 10**9))
def test_digits_with_and_without_commas_are_alike(value: int) -> None:
    assert digits(f"{value:,}") == digits(str(value)) == str(value)


@pytest.mark.parametrize(("text", "other"), [("3.5", "35"), ("3.1", "3.10"), ("1.000", "1000"), ("10:30", "1030")])
def test_digits_that_may_be_others_stay_apart(text: str, other: str) -> None:
    assert digits(text) != digits(other)


def test_roman_numerals() -> None:
    assert [roman(word) for word in ("ii", "iv", "viii", "ix", "xiv", "xxxix")] == [2, 4, 8, 9, 14, 39]
    assert [roman(word) for word in ("i", "iiii", "vv", "mix", "xi", "")] == [None] * 6


@pytest.mark.parametrize(
    "alike",
    [
        "sort sorts sorted sorting",
        "make makes made making",
        "city cities",
        "box boxes",
        "run runs ran running",
        "write writes wrote written writing",
        "organise organize organised organizing",
        "colour color colours",
        "cancelled canceled cancel",
        "theatre theater",
        "analyse analyze",
        "movie movies",
        "baby babies",
        "study studies studied",
        "quick quickly",
    ],
)
def test_forms_of_a_word_share_a_stem(alike: str) -> None:
    assert len({stem(word) for word in alike.split()}) == 1


@pytest.mark.parametrize(
    "apart",
    [
        "tall taller tallest",
        "employer employee employ",
        "glass glasses",
        "market marketing",
        "custom customs",
        "plan plane",
        "heroin heroine",
        "car care",
        "past paste",
        "hard hardly",
        "new news",
        "safe unsafe",
        "hypothermia hyperthermia",
        "rise raise",
    ],
)
def test_other_words_do_not(apart: str) -> None:
    words = apart.split()
    assert all(stem(one) != stem(other) for one, other in combinations(words, 2))


def test_no_word_is_in_two_groups_of_synonyms_and_every_phrase_is_one_that_can_be_met() -> None:
    stems = [stem_ for group in GROUPS for stem_ in {stem(word) for word in group}]
    assert len(stems) == len(set(stems))
    assert all(phrase == " ".join(phrase.lower().split()) for phrase in PHRASES)


def test_the_essence_is_without_courtesies_and_keeps_what_is_quoted() -> None:
    plain = essence("How do I sort a list?")
    assert essence("Hello! Could you please tell me how to sort a list? Thanks!") == plain
    assert '"Yes, please"' in essence('Could you please translate "Yes, please" into German?')
    assert essence("日本の首都はどこですか") == "日本の首都はどこですか"
    assert "pas" in essence("Quels pays n'ont pas de roi ?")


@given(st.text(max_size=300))
def test_every_text_has_an_essence(text: str) -> None:
    assert isinstance(essence(text), str)
    speaks_of_now(text)


@pytest.mark.parametrize("piece", ["turn a into ", "f(", "a@", "'", '"', "is a different from ", "- ", "1,", "A."])
def test_no_repetition_takes_long(piece: str) -> None:
    text = (piece * MOST_CHARACTERS)[:MOST_CHARACTERS]
    assert isinstance(essence(text), str)
    assert isinstance(speaks_of_now(piece * 20_000), bool)
