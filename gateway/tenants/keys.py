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


def matches_either(secret: str, stored: bytes, previous: bytes | None) -> bool:
    """Whether it is the secret or the one before, compared in a time that tells neither which nor how nearly."""
    hashed = hash_secret(secret)
    is_current = hmac.compare_digest(hashed, stored)
    is_previous = hmac.compare_digest(hashed, stored if previous is None else previous)
    return is_current or is_previous
