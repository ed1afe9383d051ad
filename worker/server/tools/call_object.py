"""Reads one call written as a JSON object, ``{"name": ..., "arguments": {...}}``, from text that arrives in parts."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from worker.server.tools.json_span import SPACE, JsonSpan
from worker.server.tools.pieces import PieceWriter

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_KNOWN_KEYS: Final = frozenset({"name", "type", "id"}) | _ARGUMENTS


class Outcome(Enum):
    """OPEN: more text is needed. DONE: the object is complete. BROKEN: a call was begun, and what follows is no part
    of it. FAILED: it is no call, and nothing was written of it."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()
    FAILED = auto()


class _State(Enum):
    OPENING = auto()
    FIRST_KEY = auto()
    NEXT_KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    ARGUMENTS_OPENING = auto()
    SPAN = auto()


class _Span(Enum):
    """What a key or a value that is being read is good for."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    EARLY_ARGUMENTS = auto()
    ENCODED_ARGUMENTS = auto()
    NOTHING = auto()


class CallObject:
    """One object. Its name must be a known tool's, and its arguments an object, or a text that holds one.

    As soon as both the name and the first character inside the arguments are there, the call is begun and its
    arguments are written as they come. Keys may stand in any order; those that say nothing here are skipped.
    """

    def __init__(self, names: Collection[str], writer: PieceWriter, *, marked: bool) -> None:
        """``marked``: the text says that this is a call. Otherwise an object with other keys than a call's is none,
        and neither is one without arguments."""
        self.begun = False
        self.is_other = False
        """Once it has failed: whether it is sound JSON so far, only not that of a call."""
        self.held = ""
        """The text taken so far, while no call is begun: what to give back if it is none."""
        self._names = names
        self._writer = writer
        self._marked = marked
        self._state = _State.OPENING
        self._purpose = _Span.NOTHING
        self._span = JsonSpan()
        self._value = ""
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""

    def push(self, text: str) -> tuple[int, Outcome]:
        """Take text; how many of its characters belong to the object, and what it has come to."""
        at, outcome = 0, Outcome.OPEN
        while at < len(text) and outcome is Outcome.OPEN:
            end, outcome = self._advance(text, at)
            if not self.begun:
                self.held += text[at:end]
            at = end
        return at, outcome

    def _advance(self, text: str, at: int) -> tuple[int, Outcome]:
        if self._state is _State.SPAN:
            return self._read_span(text, at)
        character = text[at]
        if self._state is _State.ARGUMENTS_OPENING:
            return self._open_arguments(character, at)
        if character in SPACE:
            return at + 1, Outcome.OPEN
        if self._state is _State.VALUE:
            return at, self._open_value(character)
        if character == '"' and self._state in (_State.FIRST_KEY, _State.NEXT_KEY):
            self._open_span(_Span.KEY)
            return at, Outcome.OPEN
        if character == "}" and self._state in (_State.FIRST_KEY, _State.AFTER_VALUE):
            return at + 1, self._close()
        if (self._state, character) not in _NEXT:
            return at, self._fault()
        self._state = _NEXT[self._state, character]
        return at + 1, Outcome.OPEN

    def _open_value(self, character: str) -> Outcome:
        if self._key == "name":
            if character != '"':
                return self._not_a_call()
            self._open_span(_Span.NAME)
        elif self._key in _ARGUMENTS and not self.begun and self._early is None:
            if character == "{":
                self._state = _State.ARGUMENTS_OPENING
                self._value = ""
            elif character == '"':
                self._open_span(_Span.ENCODED_ARGUMENTS)
            else:
                return self._not_a_call()
        else:
            self._open_span(_Span.NOTHING)
        return Outcome.OPEN

    def _open_arguments(self, character: str, at: int) -> tuple[int, Outcome]:
        """Look at what stands first inside the braces, before a call is begun that can't be taken back."""
        if not self._value or character in SPACE:
            self._value += character
            return at + 1, Outcome.OPEN
        if character not in '"}':
            return at, self._fault()
        opening = self._value
        if self._name is None:
            self._open_span(_Span.EARLY_ARGUMENTS)
            self._value = opening
        else:
            self._open_span(_Span.ARGUMENTS)
            self._begin(opening)
        self._span.advance(opening, 0)
        return at, Outcome.OPEN

    def _open_span(self, purpose: _Span) -> None:
        self._state, self._purpose, self._span, self._value = _State.SPAN, purpose, JsonSpan(), ""

    def _read_span(self, text: str, at: int) -> tuple[int, Outcome]:
        end = self._span.advance(text, at)
        if self._purpose is _Span.ARGUMENTS:
            self._writer.arguments(text[at:end])
        else:
            self._value += text[at:end]
        if self._span.broken:
            return end, self._fault()
        if self._span.done:
            self._state = _State.AFTER_VALUE
            return end, self._take_value()
        return end, Outcome.OPEN

    def _take_value(self) -> Outcome:
        match self._purpose:
            case _Span.KEY:
                key = _decoded(self._value)
                if key is None or not (self._marked or self.begun or key in _KNOWN_KEYS):
                    return self._not_a_call()
                self._key = key
                self._state = _State.COLON
            case _Span.NAME if not self.begun:
                name = _decoded(self._value)
                if name is None or name not in self._names:
                    return self._not_a_call()
                self._name = name
                if self._early is not None:
                    self._begin(self._early)
            case _Span.EARLY_ARGUMENTS:
                self._early = self._value
            case _Span.ENCODED_ARGUMENTS:
                self._early = _decoded(self._value)
                if self._early is None or not _is_object(self._early):
                    return self._not_a_call()
                if self._name is not None:
                    self._begin(self._early)
        return Outcome.OPEN

    def _begin(self, arguments: str) -> None:
        assert self._name is not None
        self.begun = True
        self._writer.start(self._name)
        self._writer.arguments(arguments)

    def _close(self) -> Outcome:
        if not self.begun:
            if not self._marked or self._name is None or self._early is not None:
                return Outcome.FAILED
            self._begin("{}")
        return Outcome.DONE

    def _not_a_call(self) -> Outcome:
        self.is_other = not self.begun
        return self._fault()

    def _fault(self) -> Outcome:
        return Outcome.BROKEN if self.begun else Outcome.FAILED


_NEXT: Final = {
    (_State.OPENING, "{"): _State.FIRST_KEY,
    (_State.COLON, ":"): _State.VALUE,
    (_State.AFTER_VALUE, ","): _State.NEXT_KEY,
}


def _decoded(string: str) -> str | None:
    """The text of a JSON string; None if it is none, or no text that can be sent."""
    try:
        text = json.loads(string, strict=False)
        text.encode()
    except ValueError:
        return None
    return str(text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
