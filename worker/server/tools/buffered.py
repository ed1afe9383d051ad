"""What the parsers of all formats share: a buffer of text, and the object that is being read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from worker.server.tools.call_object import CallObject, Outcome
from worker.server.tools.pieces import Piece, PieceWriter, new_call_id


class BufferedParser(ABC):
    """A ToolCallParser that takes its text from ``_buffer``, step by step, as far as it is certain."""

    separators = ""
    """Characters that stand between two calls."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        """``names``: of the tools that may be called. What calls another is text."""
        self._names = names
        self._writer = PieceWriter(new_id, self.separators)
        self._buffer = ""
        self._object: CallObject | None = None
        self._prefix = ""
        """Text before the object that belongs to it: text again if the object is no call."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        while self._step_object() if self._object is not None else self._step():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        if self._object is not None and not self._object.begun:
            self._writer.text(self._prefix + self._object.held)
        elif not self._is_ending(self._buffer):
            self._writer.text(self._unfinished() + self._buffer)
        self._object, self._buffer = None, ""
        self._writer.end()
        return self._writer.take()

    @abstractmethod
    def _step(self) -> bool:
        """Take from the buffer what is certain; whether something was, and more may be."""

    def _after_object(self, ended: CallObject) -> None:
        """An object has ended. If it was not begun it was no call, and is text by now."""
        return

    def _unfinished(self) -> str:
        """Text that was taken from the buffer and not written yet."""
        return ""

    def _is_ending(self, text: str) -> bool:
        """Whether this rest is a piece of the format and no text."""
        return False

    def _text_until(self, markers: Sequence[str]) -> str | None:
        """Write the text before the first of the markers, which stays in the buffer; None if none is there."""
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        end, marker = min(found) if found else (len(self._buffer) - _begun_length(self._buffer, markers), None)
        self._writer.text(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return marker

    def _begin_object(self, prefix: str, *, marked: bool) -> None:
        self._prefix = prefix
        self._object = CallObject(self._names, self._writer, marked=marked)

    def _step_object(self) -> bool:
        assert self._object is not None
        taken, outcome = self._object.push(self._buffer)
        self._buffer = self._buffer[taken:]
        if outcome is Outcome.OPEN:
            return False
        if outcome is Outcome.FAILED:
            self._writer.text(self._prefix + self._object.held)
        ended, self._object = self._object, None
        self._after_object(ended)
        return True


def _begun_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest ending of ``text`` that begins one of the markers."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next((size for size in range(longest, 0, -1) if any(m.startswith(text[-size:]) for m in markers)), 0)
