"""What the deployment's one secret key is good for: hashes that nobody else can make, and values sealed at rest.

Each purpose has a key of its own, derived by HKDF (RFC 5869), so that no value of one purpose says anything of another.
Sealing is AES-256-GCM (NIST SP 800-38D) with a random 96-bit nonce in front; ``context`` binds a value to its place.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MIN_LENGTH: Final = 32
_NONCE_BYTES: Final = 12


class SealBroken(Exception):
    """A sealed value was made by another key, for another place, or was changed."""


class SecretKey:
    """``text``: at least 32 characters, alike on every replica (``PENSTOCK_SECRET_KEY``)."""

    def __init__(self, text: str) -> None:
        if len(text) < MIN_LENGTH:
            raise ValueError(f"the secret key must have at least {MIN_LENGTH} characters; try `openssl rand -hex 32`")
        material = text.encode()

        @cache
        def derived(purpose: str) -> bytes:
            return HKDF(SHA256(), length=32, salt=None, info=b"penstock " + purpose.encode()).derive(material)

        self._derived = derived

    def keyed_hash(self, purpose: str, *parts: bytes) -> str:
        """HMAC-SHA256 of the parts, each told apart from the next, as 64 hex digits."""
        mac = hmac.new(self._derived(f"hash {purpose}"), digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest()

    def seal(self, purpose: str, value: bytes, *, context: bytes = b"") -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self._derived(f"seal {purpose}")).encrypt(nonce, value, context)

    def unseal(self, purpose: str, sealed: bytes, *, context: bytes = b"") -> bytes:
        """Raises SealBroken."""
        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return AESGCM(self._derived(f"seal {purpose}")).decrypt(nonce, rest, context)
        except (InvalidTag, ValueError) as fault:
            raise SealBroken("it was sealed by another PENSTOCK_SECRET_KEY, or was changed") from fault
