"""A data key: the published construction, bound to key and place."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.datakeys.data_key import OVERHEAD, DataKey, key_id_of
from gateway.secret_key import SealBroken

ID = UUID("00000000-0000-7000-8000-000000000001")
KEY = DataKey(ID, bytes(range(32)))


@pytest.mark.parametrize(
    ("secret", "context", "ciphertext"),
    [
        (b"\x01" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\x03" * 32, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
    ids=["top bit of the subkey clear", "top bit of the subkey set"],
)
def test_the_specification_s_own_vectors(secret: bytes, context: bytes, ciphertext: str) -> None:
    assert DataKey(ID, secret).encrypt(b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM", context).hex() == ciphertext


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_what_is_sealed_is_unsealed_in_its_place_alone(data: bytes, context: bytes) -> None:
    sealed = KEY.seal(data, context)
    assert len(sealed) == len(data) + OVERHEAD
    assert key_id_of(sealed) == ID
    assert KEY.unseal(sealed, context) == data
    with pytest.raises(SealBroken, match="another place"):
        KEY.unseal(sealed, context + b"x")


@given(st.data())
def test_a_changed_or_cut_value_is_refused(data: st.DataObject) -> None:
    sealed = KEY.seal(b"what was said", b"here")
    place = data.draw(st.integers(0, len(sealed) - 1))
    for broken in (sealed[:place], sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]):
        with pytest.raises(SealBroken):
            KEY.unseal(broken, b"here")


def test_one_key_does_not_open_another_s_nor_is_one_value_sealed_alike_twice() -> None:
    sealed = KEY.seal(b"x", b"")
    assert sealed != KEY.seal(b"x", b"")
    for other in (DataKey(uuid4(), bytes(range(32))), DataKey(ID, bytes(32))):
        with pytest.raises(SealBroken):
            other.unseal(sealed, b"")
    assert key_id_of(sealed[: OVERHEAD - 1]) is None


def test_a_key_shows_nothing_of_its_secret() -> None:
    key = DataKey(ID, b"secret of thirty-two bytes here.")
    assert "secret" not in f"{key!r} {key}"
