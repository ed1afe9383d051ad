"""What a tool-call parser makes of a model's text, piece by piece."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. ``index`` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, never empty: JSON text exactly as the model wrote it."""

    index: int
    text: str


Piece = Text | CallStart | CallArguments


class ToolCallParser(Protocol):
    """Finds calls in text that arrives in parts.

    However the text is cut into parts, the pieces say the same: texts joined, and the arguments of each call joined.
    Nothing makes it raise. What is no call comes out as text, whole; white space between calls is left out, and what
    was streamed of a call that turns out to be broken stays.
    """

    def push(self, text: str) -> list[Piece]:
        """What became certain with ``text``."""
        ...

    def finish(self) -> list[Piece]:
        """What is left when no more text comes."""
        ...


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class PieceWriter:
    """Collects pieces: joins neighbours, counts calls, and leaves out white space that only surrounds calls."""

    def __init__(self, new_id: Callable[[], str] = new_call_id, separators: str = "") -> None:
        """``separators``: characters that stand between calls and say nothing."""
        self._new_id = new_id
        self._separators = separators
        self._pieces: list[Piece] = []
        self._calls = 0
        self._between: str | None = ""
        """Text since the beginning or the last call, while it is only white space; None once it is more."""

    def text(self, text: str) -> None:
        if self._between is None:
            self._write(text)
            return
        ignored = self._separators if self._calls else ""
        body = text.lstrip(" \t\r\n" + ignored)
        self._between += text[: len(text) - len(body)]
        if body:
            self._write(self._between + body)
            self._between = None

    def start(self, name: str) -> None:
        self._pieces.append(CallStart(self._calls, self._new_id(), name))
        self._calls += 1
        self._between = ""

    def arguments(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallArguments):
            self._pieces[-1] = CallArguments(last.index, last.text + text)
        else:
            self._pieces.append(CallArguments(self._calls - 1, text))

    def skip_space(self) -> None:
        """White space since the last call belongs to that call."""
        if self._between is not None:
            self._between = ""

    def end(self) -> None:
        """No more text comes: an answer of white space alone is an answer."""
        if self._between and not self._calls:
            self._write(self._between)
        self._between = None

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _write(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Text):
            self._pieces[-1] = Text(last.text + text)
        else:
            self._pieces.append(Text(text))
