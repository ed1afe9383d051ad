"""Texts that callers send and Postgres is to keep or compare with."""

from __future__ import annotations

from gateway.tenants.records import InvalidField

MOST: int = 1000


def check_plain(field: str, text: str | None) -> str | None:
    """``text``, if Postgres can hold it and it is not endless. Raises InvalidField."""
    try:
        good = text is None or (0 < len(text) <= MOST and b"\0" not in text.encode())
    except UnicodeEncodeError:
        good = False
    if not good:
        raise InvalidField(field, f"it is plain text of 1 to {MOST} characters")
    return text
