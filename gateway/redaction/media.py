"""Data in a text: images, sound and documents may show faces and names that nobody can look for here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.redaction.spans import Span, compiled

DATA: Final = "DATA"
BASE64: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_"
_RUN = re.compile(rb"[A-Za-z0-9+/=_-]*")
_HEAD = compiled(r"data:[a-zA-Z0-9.+/-]{0,80}(?:;[a-zA-Z0-9.=_-]{1,80}){0,4};base64,")
_URL = re.compile(r"data:[^,\s]{0,400};base64,")
_LEAST: Final = 256
"""Characters from which on a text that is nothing but base64 is taken for data."""


def data_urls(data: bytes) -> Iterator[Span]:
    """What stands behind the head of each."""
    if b";base64," not in data:
        return
    for match in _HEAD.finditer(data):
        start = match.end()
        run = _RUN.match(data, start)
        end = run.end() if run is not None else start
        if end > start:
            yield Span(start, end, DATA)


def as_data(text: str) -> str | None:
    """A placeholder for a text that is wholly data, as media parts have it. None: it is none."""
    head = _URL.match(text)
    if head is None and len(text) < _LEAST:
        return None
    body = text[head.end() :] if head is not None else text
    if not body or body.strip(BASE64):
        return None
    size = len(body.rstrip("=")) * 3 // 4
    return f"{head[0] if head is not None else ''}[{DATA} {size} bytes]"
