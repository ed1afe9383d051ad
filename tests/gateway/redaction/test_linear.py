"""Texts made to take long take no longer than their size allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from gateway.redaction import Redactor, StreamRedactor

SIZE = 1024 * 1024
UNITS = (
    *("@", "a@", "a@b.", "x" * 63 + "@", "1", "1234 ", "12-", "0171 ", "01/", "+1", "(0", "call 12", "tel "),
    *(
        "4111 1111 1111 1111 ",
        "123-45-678",
        "DE89 ",
        "DE89",
        "AB12 34",
        "RSSMRA85T",
        "password:",
        'password="',
        "secret is ",
    ),
    *(
        "-----BEGIN ",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----A\n",
        "data:;base64,",
        "eyJ",
        "eyJaaaaaaaa.",
    ),
    *("sk-", "sk-a1", "a://b:c", "bearer ", "Hash: ", "\\", '"', "é", "😀", "\n"),
)
MOST_A_KILOBYTE = 25_000
"""Calls, of Python's and of C's functions: the worst of these needs some 18,000."""


def calls_of(work: Callable[[], Any]) -> int:
    count = 0

    def seen(_frame: FrameType, event: str, _of: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_twice_the_text_takes_twice_the_steps(unit: str) -> None:
    def text_of(size: int) -> str:
        return (unit * (size // len(unit) + 1))[:size]

    one, two = text_of(20_000), text_of(40_000)
    redactor = Redactor()
    small, large = calls_of(lambda: redactor.text(one)), calls_of(lambda: redactor.text(two))
    assert large <= 3 * small + 1000
    assert large <= MOST_A_KILOBYTE * 40


@pytest.mark.parametrize("unit", ["nothing to see ", "1", "@", "-----BEGIN ", "password:"])
def test_a_megabyte_ends(unit: str) -> None:
    text = (unit * (SIZE // len(unit) + 1))[:SIZE]
    assert Redactor().text(text) == text


def test_a_megabyte_in_pieces_of_a_character_ends() -> None:
    stream, text = StreamRedactor(Redactor()), "nothing to see " * 20_000
    assert "".join([*map(stream.feed, text), stream.end()]) == text


def test_json_in_json_in_json_ends() -> None:
    value: Any = "x@example.com"
    for _ in range(14):
        value = json.dumps({"a": value})
    assert b"[EMAIL]" in Redactor().json(value.encode())
