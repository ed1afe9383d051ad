"""A text looked for in bodies: in the strings of their JSON, whatever the case and however accents are written."""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

import msgspec


class Needle:
    """``text``: to be found as a part of a string's value. Keys and numbers are not looked at."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("the text to look for is empty")
        self._folded = _folded(text)

    def within(self, body: bytes) -> bool:
        """A body that is no JSON, as one that was cut, is looked through as it stands."""
        try:
            value: Any = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return self._folded in _folded(body.decode(errors="replace"))
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if isinstance(each, str):
                if self._folded in _folded(each):
                    return True
            elif isinstance(each, dict):
                waiting.extend(each.values())
            elif isinstance(each, list):
                waiting.extend(each)
        return False


def _folded(text: str) -> str:
    """An accent may be a character of its own, before letters are folded and behind that."""
    return text.lower() if text.isascii() else normalize("NFC", normalize("NFC", text).casefold())
