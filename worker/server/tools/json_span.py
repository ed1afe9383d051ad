"""Finds where one JSON value ends in text that arrives in parts."""

from __future__ import annotations

import re
from typing import Final

SPACE: Final = " \t\r\n"
_IN_STRING: Final = re.compile(r'[^"\\]*')
_BETWEEN: Final = re.compile(r"[ \t\r\n0-9A-Za-z_+\-.,:]*")
_SCALAR: Final = re.compile(r"[0-9A-Za-z+\-.]*")
_CLOSES: Final = {"{": "}", "[": "]"}


class JsonSpan:
    """One JSON value, from its first character on.

    It is lenient: brackets must match, and outside of strings only characters that JSON has are let through. What is
    between them is not looked at, because the text may have been passed on already when it turns out to be wrong.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self._empty = True

    def advance(self, text: str, at: int) -> int:
        """Take characters of ``text`` from ``at`` on; where the value ends, breaks, or the text does."""
        while at < len(text) and not self.done and not self.broken:
            at = self._string(text, at) if self._in_string else self._outside(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        run = _IN_STRING.match(text, at)
        assert run is not None
        at = run.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        character = text[at]
        if self._empty and character not in '{["':
            self._scalar = True
        if self._scalar:
            run = _SCALAR.match(text, at)
            assert run is not None
            self.broken = self._empty and run.end() == at
            self.done = not self.broken and run.end() < len(text)
            self._empty = False
            return run.end()
        self._empty = False
        if character == '"':
            self._in_string = True
        elif character in _CLOSES:
            self._closers.append(_CLOSES[character])
        elif self._closers[-1] == character:
            self._closers.pop()
            self.done = not self._closers
        else:
            run = _BETWEEN.match(text, at)
            assert run is not None
            self.broken = run.end() == at
            return run.end()
        return at + 1
