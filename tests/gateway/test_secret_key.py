from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.secret_key import SealBroken, SecretKey

KEY = SecretKey("k" * 32)


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_what_is_sealed_comes_back_at_its_place_alone(value: bytes, context: bytes) -> None:
    sealed = KEY.seal("purpose", value, context=context)
    assert KEY.unseal("purpose", sealed, context=context) == value
    for purpose, at, key in (("other", context, KEY), ("purpose", context + b"x", KEY)):
        with pytest.raises(SealBroken):
            key.unseal(purpose, sealed, context=at)
    with pytest.raises(SealBroken):
        SecretKey("K" * 32).unseal("purpose", sealed, context=context)
    with pytest.raises(SealBroken):
        KEY.unseal("purpose", sealed[:-1] + bytes([sealed[-1] ^ 1]), context=context)


@pytest.mark.parametrize("stump", [b"", b"short", b"0" * 12])
def test_a_stump_is_no_sealed_value(stump: bytes) -> None:
    with pytest.raises(SealBroken):
        KEY.unseal("purpose", stump)


def test_hashes_differ_by_key_purpose_and_cut() -> None:
    assert KEY.keyed_hash("p", b"ab", b"c") == KEY.keyed_hash("p", b"ab", b"c")
    others = [
        KEY.keyed_hash("p", b"a", b"bc"),
        KEY.keyed_hash("q", b"ab", b"c"),
        SecretKey("K" * 32).keyed_hash("p", b"ab", b"c"),
    ]
    assert len({KEY.keyed_hash("p", b"ab", b"c"), *others}) == 4


def test_a_short_key_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        SecretKey("short")
