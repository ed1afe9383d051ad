"""Keeps what a request says apart from what a chat template says, through the template's own work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

_WORD: Final = re.compile(r"[A-Za-z0-9_-]+")


class TornMark(ValueError):
    """A template tore a mark apart; the message says what it stood for."""


class Veil:
    """Replaces special tokens that a message spells by marks which nobody can guess, and puts their text back after
    the template's own special tokens have been found.

    Text of a message that could become a special token together with the template's text beside it (it ends in the
    beginning of one, begins with the end of one, or is a piece of one) is kept apart by empty marks. All other text
    goes through untouched, so that what a template sees and makes of ordinary messages is what it always would be.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)
        # Private-use characters: no template's case folding, stripping or JSON changes them.
        nonce = "".join(chr(0xE100 + byte) for byte in os.urandom(12))
        self._empty = f"\ue000{nonce}\ue001"
        self._marks = {token: f"\ue000{nonce}{chr(0xE200 + at)}\ue001" for at, token in enumerate(self._tokens)}
        self._end = f"\ue000{nonce}\ue002 "
        self._nonce = nonce
        self._used = False

    def hide(self, text: str) -> str:
        """``text`` veiled."""
        return self._hide(text, apart=True)

    def hide_data(self, value: Any) -> Any:
        """``value``, as JSON has it, with every text inside it veiled, keys included.

        A single word only where it spells a special token: templates compare such texts with words of their own
        (``"string"``, ``"function"``), and look keys up by them.
        """
        if isinstance(value, str):
            return self._hide(value, apart=_WORD.fullmatch(value) is None)
        if isinstance(value, Mapping):
            return {self.hide_data(key): self.hide_data(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide_data(item) for item in value]
        return value

    @property
    def end(self) -> str:
        """A mark to put behind a text, for ``cut_at_end``."""
        self._used = True
        return self._end

    def cut_at_end(self, rendered: str, text: str) -> str:
        """``rendered`` up to the end of ``text``, which bore the mark. Raises TornMark if either is not there.

        The mark ends in a space: where a template stripped that, it stripped the text too, which must end so.
        """
        mark = self._end.rstrip()
        at = rendered.rfind(mark)
        if at < 0 or text.strip() not in rendered:
            raise TornMark("the last message as it is, so that the answer can't go on with it")
        cut = rendered[:at].replace(self._end, "").replace(mark, "")
        return cut if rendered.startswith(self._end, at) else cut.rstrip()

    def _hide(self, text: str, *, apart: bool) -> str:
        if not text:
            return text
        given = text
        for token in self._tokens:
            text = text.replace(token, self._marks[token])
        if apart:
            inside = any(text in token for token in self._tokens)
            before = inside or any(_overlap(token, text) for token in self._tokens)
            after = inside or any(_overlap(text, token) for token in self._tokens)
            text = f"{self._empty if before else ''}{text}{self._empty if after else ''}"
        self._used |= text != given
        return text

    def show(self, text: str) -> str:
        """Undo ``hide``. Raises TornMark if a template tore a mark apart."""
        if not self._used:
            return text
        text = self.show_loosely(text)
        if any(self._nonce[at : at + 3] in text for at in range(len(self._nonce) - 2)):
            raise TornMark("the special tokens spelled in the messages")
        return text

    def show_loosely(self, text: str) -> str:
        """Undo ``hide`` as far as marks are whole."""
        text = text.replace(self._empty, "")
        for token, mark in self._marks.items():
            text = text.replace(mark, token)
        return text


def _overlap(left: str, right: str) -> bool:
    """Whether some ending of ``left`` is a beginning of ``right``."""
    return any(left.endswith(right[:size]) for size in range(1, min(len(left), len(right)) + 1))
