"""API keys as text: ``sk-penstock-<public id>-<secret>``. The secret is shown once; only its SHA-256 is stored.

A secret has 256 random bits, so a plain hash is enough: there is no dictionary to try, and a slow hash would only slow
each request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass, field

PUBLIC_ID_LENGTH = 12
_PUBLIC_ID_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32
_KEY = re.compile(r"sk-penstock-([a-z0-9]{12})-([A-Za-z0-9_-]{43})", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at its birth, the one time its text is known."""

    public_id: str
    text: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


def generate_key() -> NewKey:
    return renew_key("".join(secrets.choice(_PUBLIC_ID_ALPHABET) for _ in range(PUBLIC_ID_LENGTH)))


def renew_key(public_id: str) -> NewKey:
    """Another secret for the key of this public id."""
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    return NewKey(public_id, f"sk-penstock-{public_id}-{secret}", hash_secret(secret))


class Known:
    """What keys that were good come to, so that they are not read and hashed again. Of others nothing is remembered."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._hashed: dict[str, tuple[str, bytes]] = {}

    def find(self, text: str) -> tuple[str, bytes] | None:
        """Public id and hashed secret, or None when ``text`` cannot be one of our keys."""
        found = self._hashed.get(text)
        if found is None and (parsed := parse_key(text)) is not None:
            found = parsed[0], hash_secret(parsed[1])
        return found

    def keep(self, text: str, found: tuple[str, bytes]) -> None:
        """``found`` turned out to be good."""
        if text not in self._hashed:
            if len(self._hashed) >= self._most:
                self._hashed.clear()
            self._hashed[text] = found

    def forget(self, text: str) -> None:
        """It is good no more. It is read and hashed once more, so that it cannot be told by the time from one that
        never was."""
        if self._hashed.pop(text, None) is not None:
            self.find(text)


def parse_key(text: str) -> tuple[str, str] | None:
    """Public id and secret, or None when ``text`` cannot be one of our keys."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def hash_secret(secret: str) -> bytes:
    """32 bytes, as stored."""
    return hashlib.sha256(secret.encode()).digest()


def secret_matches(secret: str, stored: bytes) -> bool:
    """Compared in a time that does not depend on where the two differ."""
    return hmac.compare_digest(hash_secret(secret), stored)


def matches_either(hashed: bytes, stored: bytes, previous: bytes | None) -> bool:
    """Whether it is the secret or the one before, compared in a time that tells neither which nor how nearly."""
    is_current = hmac.compare_digest(hashed, stored)
    is_previous = hmac.compare_digest(hashed, stored if previous is None else previous)
    return is_current or is_previous
