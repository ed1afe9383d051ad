"""Keeps a backend's secrets out of what it says: some servers repeat the key or the headers that they were sent."""

from __future__ import annotations

import re
from collections.abc import Iterable


def masked(data: bytes, secrets: Iterable[str]) -> bytes:
    """``data`` with ``***`` for each of ``secrets``, also where JSON has them in escapes, as ``\\/`` or ``\\u0026``."""
    for secret in secrets:
        data = data.replace(secret.encode(), b"***")
        if b"\\" in data:
            data = re.sub("".join(map(_in_json, secret)).encode(), b"***", data)
    return data


def _in_json(character: str) -> str:
    """Each way to write it within a string."""
    itself = re.escape(character)
    as_number = "".join(f"[{digit}{digit.upper()}]" for digit in f"{ord(character):04x}")
    return rf"(?:\\{itself}|\\u{as_number}|{itself})"
