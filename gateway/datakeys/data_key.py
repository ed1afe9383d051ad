"""One data key, and what it seals: XAES-256-GCM (C2SP, https://c2sp.org/XAES-256-GCM).

Plain AES-GCM with random nonces of 96 bits may seal 2^32 values, which a busy tenant reaches within months. XAES takes
nonces of 192 bits: the first half makes a key of its own for the value, by two blocks of AES, the second is that key's
nonce. So a data key seals as many values as there will ever be.
"""

from __future__ import annotations

import os
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from gateway.secret_key import SealBroken

KEY_BYTES: Final = 32
ID_BYTES: Final = 16
NONCE_BYTES: Final = 24
OVERHEAD: Final = ID_BYTES + NONCE_BYTES + 16
"""Bytes by which a sealed value is longer than the plain one."""
_HALF: Final = NONCE_BYTES // 2
_FIRST: Final = b"\x00\x01X\x00"
_SECOND: Final = b"\x00\x02X\x00"


def key_id_of(sealed: bytes) -> UUID | None:
    """Of the key that sealed it; None for what no key sealed."""
    return UUID(bytes=sealed[:ID_BYTES]) if len(sealed) >= OVERHEAD else None


class DataKey:
    """May be used by several threads at once. It shows nothing of its secret."""

    __slots__ = ("_mask", "_secret", "id")

    def __init__(self, id: UUID, secret: bytes) -> None:
        self.id = id
        self._secret = secret
        block = int.from_bytes(self._blocks(bytes(AES.block_size // 8)))
        doubled = (block << 1 & (1 << 128) - 1) ^ (0x87 if block >> 127 else 0)
        self._mask = doubled << 128 | doubled

    def __repr__(self) -> str:
        return f"DataKey({self.id})"

    def seal(self, data: bytes, context: bytes) -> bytes:
        """``context`` binds the value to its place. The key's id and a random nonce stand in front of the result."""
        nonce = os.urandom(NONCE_BYTES)
        return self.id.bytes + nonce + self.encrypt(nonce, data, context)

    def unseal(self, sealed: bytes, context: bytes) -> bytes:
        """Raises SealBroken for a value of another key or another place, or one that was changed."""
        nonce, rest = sealed[ID_BYTES : ID_BYTES + NONCE_BYTES], sealed[ID_BYTES + NONCE_BYTES :]
        try:
            if sealed[:ID_BYTES] == self.id.bytes:
                return self._of(nonce).decrypt(nonce[_HALF:], rest, context)
        except (InvalidTag, ValueError) as fault:
            raise SealBroken("it was sealed for another place, or was changed") from fault
        raise SealBroken("it was sealed by another data key")

    def encrypt(self, nonce: bytes, data: bytes, context: bytes) -> bytes:
        """Ciphertext and tag; no two values may have the same nonce of 24 bytes."""
        return self._of(nonce).encrypt(nonce[_HALF:], data, context)

    def _of(self, nonce: bytes) -> AESGCM:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        pair = int.from_bytes(_FIRST + nonce[:_HALF] + _SECOND + nonce[:_HALF])
        return AESGCM(self._blocks((pair ^ self._mask).to_bytes(32)))

    def _blocks(self, data: bytes) -> bytes:
        # Each block by itself: that is what a key's derivation by AES-CMAC comes to for one block of input.
        return Cipher(AES(self._secret), ECB()).encryptor().update(data)
