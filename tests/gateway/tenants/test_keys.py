from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tenants.keys import Known, generate_key, hash_secret, parse_key, renew_key, secret_matches

SHAPE = re.compile(r"\Ask-penstock-([a-z0-9]{12})-([A-Za-z0-9_-]{43})\Z")
GOOD = "sk-penstock-abcdefghij01-" + "s" * 43


def test_a_new_key_has_the_promised_shape_and_reads_back() -> None:
    key = generate_key()
    shape = SHAPE.match(key.text)
    assert shape
    assert parse_key(key.text) == (key.public_id, shape[2])
    assert key.secret_sha256 == hashlib.sha256(shape[2].encode()).digest()
    assert secret_matches(shape[2], key.secret_sha256)


def test_only_good_keys_are_remembered_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def noting(secret: str) -> bytes:
        hashed.append(secret)
        return hash_secret(secret)

    monkeypatch.setattr("gateway.tenants.keys.hash_secret", noting)
    known, keys = Known(most=2), [renew_key(f"abcdefghij0{number}") for number in range(4)]
    hashed.clear()
    for key in keys:
        found = known.find(key.text)
        assert found == (key.public_id, key.secret_sha256)
        known.keep(key.text, found)
        assert known.find(key.text) == found
    assert len(hashed) == 4
    assert known.find(GOOD[:-1]) is None
    known.find(GOOD)
    known.find(GOOD)
    assert len(hashed) == 6
    known.find(keys[0].text)  # more than it remembers
    known.forget(keys[3].text)  # takes as long as for a key that never was good
    assert len(hashed) == 8
    known.forget(keys[3].text)
    known.find(keys[3].text)
    assert len(hashed) == 9


def test_no_two_keys_are_alike() -> None:
    keys = [generate_key() for _ in range(200)]
    assert len({key.public_id for key in keys}) == 200
    assert len({key.secret_sha256 for key in keys}) == 200


def test_the_text_is_not_in_the_representation() -> None:
    key = generate_key()
    assert key.text[-20:] not in repr(key)
    assert key.public_id in repr(key)


@given(st.one_of(st.text(), st.from_regex(r"sk-penstock-.{0,70}"), st.from_regex(SHAPE)))
@example(GOOD)
@example(GOOD + "\n")
@example(" " + GOOD)
@example(GOOD[:-1])
@example(GOOD + "s")
@example(GOOD.replace("-penstock-", "-PENSTOCK-"))
@example(GOOD.replace("a", "\N{CYRILLIC SMALL LETTER A}"))
@example(GOOD.replace("01", "\N{ARABIC-INDIC DIGIT ONE}1"))
@example(GOOD.replace("sss", "s\x00s"))
@example("\ud800" + GOOD)
def test_only_what_has_the_shape_is_read(text: str) -> None:
    parsed = parse_key(text)
    shape = SHAPE.match(text)
    assert parsed == (shape.groups() if shape else None)


@given(st.text(alphabet=st.characters(codec="utf-8")), st.text(alphabet=st.characters(codec="utf-8")))
def test_a_secret_matches_its_own_hash_alone(one: str, other: str) -> None:
    assert secret_matches(one, hash_secret(other)) == (one == other)
