"""Each kind: what is one, what only looks like one."""

from __future__ import annotations

import phonenumbers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.redaction import Redactor, checksums
from gateway.redaction.payment import is_card
from tests.gateway.redaction.cases import ALONE, IN_TEXT, PEM, WHOLE

ONES = [(kind, text) for kind, texts in WHOLE.items() for text in texts]


@pytest.mark.parametrize(("kind", "text"), ONES, ids=[f"{kind}-{text[:24]!r}" for kind, text in ONES])
def test_it_is_blacked_out_wherever_it_stands(kind: str, text: str) -> None:
    for before, after in (
        ("", ""),
        ("It is ", " they say."),
        ("(", ")"),
        ("é\n", "\n次"),
        ('{"a": "', '"}'),
        ("x: ", ";"),
    ):
        redactor = Redactor()
        assert redactor.text(before + text + after) == f"{before}[{kind}]{after}"
        assert redactor.counts == {kind: 1}


@pytest.mark.parametrize(("text", "expected"), IN_TEXT)
def test_it_is_found_in_text(text: str, expected: str) -> None:
    assert Redactor().text(text) == expected
    assert Redactor().text(expected) == expected


@pytest.mark.parametrize("text", ALONE)
def test_it_is_left_alone(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == text
    assert redactor.text(f"Look: {text} (so it was)") == f"Look: {text} (so it was)"
    assert not redactor.counts


def test_every_countrys_phone_numbers_are_found_as_they_are_written_abroad() -> None:
    missed = []
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        for kind in (phonenumbers.PhoneNumberType.FIXED_LINE, phonenumbers.PhoneNumberType.MOBILE):
            number = phonenumbers.example_number_for_type(region, kind)
            if number is None:
                continue
            for form in (phonenumbers.PhoneNumberFormat.INTERNATIONAL, phonenumbers.PhoneNumberFormat.E164):
                text = phonenumbers.format_number(number, form)
                if Redactor().text(f"ring {text}, now") != "ring [PHONE], now":
                    missed.append((region, text))
    assert missed == []


def test_national_numbers_of_some_countries_are_found_as_they_are_written_there() -> None:
    for region in ("US", "CA", "DE", "FR", "GB", "NL", "CH", "AT", "BE"):
        for kind in (phonenumbers.PhoneNumberType.FIXED_LINE, phonenumbers.PhoneNumberType.MOBILE):
            number = phonenumbers.example_number_for_type(region, kind)
            assert number is not None
            text = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
            assert Redactor().text(f"It is {text}.") == "It is [PHONE].", (region, text)


@given(digits=st.from_regex(r"4[0-9]{14}", fullmatch=True))
def test_of_ten_numbers_one_is_a_card(digits: str) -> None:
    assert sum(is_card(digits + last) for last in "0123456789") == 1


@given(
    digits=st.from_regex(r"[2-9][0-9]{10}", fullmatch=True),
    place=st.integers(0, 10),
    other=st.sampled_from("0123456789"),
)
def test_verhoeff_finds_every_wrong_digit(digits: str, place: int, other: str) -> None:
    (whole,) = [digits + last for last in "0123456789" if checksums.verhoeff(digits + last)]
    changed = whole[:place] + other + whole[place + 1 :]
    assert checksums.verhoeff(changed) is (changed == whole)


@given(digits=st.from_regex(r"[0-9]{8}", fullmatch=True))
def test_one_letter_belongs_to_a_dni(digits: str) -> None:
    assert sum(checksums.dni(digits + letter) for letter in "TRWAGMYFPDXBNJZSQVHLCKE") == 1


@given(digits=st.from_regex(r"[0-9]{9}", fullmatch=True).filter(lambda digits: len(set(digits)) > 1))
def test_two_digits_belong_to_a_cpf(digits: str) -> None:
    assert sum(checksums.cpf(f"{digits}{last:02}") for last in range(100)) == 1


def test_a_corsican_has_a_key_too() -> None:
    key = 97 - 1850519123456 % 97
    assert Redactor().text(f"1 85 05 2A 123 456 {key:02}") == "[NATIONAL_ID]"
    assert Redactor().text(f"1 85 05 2A 123 456 {(key + 1) % 97:02}") != "[NATIONAL_ID]"


def test_a_private_key_without_an_end_ends_where_its_lines_do() -> None:
    cut = PEM[: PEM.index("\nq83v")]
    assert Redactor().text(f"{cut}\n\nSo much for the key, dear reader.").endswith("key, dear reader.")
    assert "MII" not in Redactor().text(f"{cut}\n\nSo much for the key, dear reader.")


def test_overlapping_finds_are_one() -> None:
    assert Redactor().text("password=jane@example.com1") == "password=[SECRET]"
    assert Redactor().text("https://jane:pw12@example.com") == "https://jane:[SECRET]"


@pytest.mark.parametrize("around", ["é", "ß", "語", "😀"])
def test_what_begins_or_ends_with_a_wide_character_is_found_whole(around: str) -> None:
    for text in (f"Token:{around}+4930901820", f"password={around}hunter2{around}", f"secret: {around}x1{around} then"):
        assert around not in Redactor().text(text)
