"""How long a backend wants to be left alone, as its answer's headers tell it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import ceil

MOST_S = 86_400.0
"""More than a day is taken for a day: what a backend says is no reason to forget it for ever."""
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Seconds that ``retry-after`` asks for, whole or with a fraction, or until its date; None: it tells none.

    Reference: RFC 9110, section 10.2.3.
    """
    text = _clean(header)
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


def for_clients(header: str | None) -> str | None:
    """The header as it can be passed on: seconds are whole, as the RFC has them."""
    text = _clean(header)
    return str(ceil(float(text))) if text is not None and _SECONDS.fullmatch(text) else text


def finest(seconds: str | None, milliseconds: str | None) -> str | None:
    """``retry-after`` of a server that, as OpenAI's, sends ``retry-after-ms`` beside it."""
    text = _clean(milliseconds)
    return f"{float(text) / 1000:.3f}" if text is not None and _SECONDS.fullmatch(text) else seconds


def _clean(header: str | None) -> str | None:
    text = None if header is None else header.strip()
    return text if text and _PRINTABLE.fullmatch(text) else None
