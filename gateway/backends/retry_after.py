"""How long a backend wants to be left alone, as its answer's headers tell it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MOST_S = 86_400.0
"""More than a day is taken for a day: what a backend says is no reason to forget it for ever."""
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Seconds that ``retry-after`` asks for, whole or with a fraction, or until its date; None: it tells none.

    Reference: RFC 9110, section 10.2.3.
    """
    text = passable(header)
    if text is None:
        return None
    if _SECONDS.fullmatch(text):
        return min(float(text), MOST_S)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max((until - now).total_seconds(), 0.0), MOST_S)


def passable(header: str | None) -> str | None:
    """The header, if it can be passed on in one."""
    text = None if header is None else header.strip()
    return text if text and _PRINTABLE.fullmatch(text) else None


def of_milliseconds(header: str | None) -> str | None:
    """``retry-after`` for ``retry-after-ms``, which OpenAI's servers send beside it and which is finer."""
    text = passable(header)
    return f"{float(text) / 1000:.3f}" if text is not None and _SECONDS.fullmatch(text) else None
