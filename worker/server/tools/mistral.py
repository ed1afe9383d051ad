"""Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, and since 2025 ``[TOOL_CALLS]name{...}`` for each
call, with ``[ARGS]`` (and ``[CALL_ID]`` and an id before it) between name and arguments where the tokenizer has them.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from worker.server.tools.buffered import BufferedParser
from worker.server.tools.call_object import CallObject
from worker.server.tools.json_span import SPACE, JsonSpan

MARKER: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
_LONGEST_HEAD: Final = 256
"""Characters that may stand between the marker and the arguments; more of them are no head of a call."""
_HEAD: Final = re.compile(
    r"\s*(?P<name>[A-Za-z0-9_.\-]+)\s*(\[CALL_ID\]\s*[A-Za-z0-9_\-]*\s*)?(\[ARGS\]\s*)?(?P<opening>\{\s*)[\"}]"
)
_HEAD_CHARACTERS: Final = re.compile(r"[A-Za-z0-9_.\-\s\[\]{]*")


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    IN_LIST = auto()


class MistralParser(BufferedParser):
    """See the module. What follows the marker decides which form it is; text may follow either."""

    _state = _State.TEXT
    _span = JsonSpan()

    def _step(self) -> bool:
        match self._state:
            case _State.TEXT:
                if self._text_until((MARKER,)) is None:
                    return False
                self._buffer = self._buffer[len(MARKER) :]
                self._state = _State.HEAD
                return True
            case _State.HEAD:
                return self._step_head()
            case _State.ARGUMENTS:
                return self._step_arguments()
            case _State.IN_LIST:
                return self._step_list()

    def _step_head(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if body.startswith("["):
            body = body[1:].lstrip(SPACE)
        elif body and not body.startswith("{"):
            return self._step_named()
        taken = len(self._buffer) - len(body)
        if taken > _LONGEST_HEAD or not (body.startswith("{") or not body):
            return self._give_up()
        return bool(body) and self._open_object(MARKER + self._buffer[:taken], body)

    def _open_object(self, prefix: str, rest: str) -> bool:
        self._buffer = rest
        self._begin_object(prefix, marked=True)
        return True

    def _after_object(self, ended: CallObject) -> None:
        self._state = _State.IN_LIST if ended.begun else _State.TEXT

    def _step_named(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is None:
            characters = _HEAD_CHARACTERS.match(self._buffer)
            assert characters is not None
            if characters.end() == len(self._buffer) <= _LONGEST_HEAD:
                return False
            return self._give_up()
        if head.end() > _LONGEST_HEAD or head["name"] not in self._names:
            return self._give_up()
        self._writer.start(head["name"])
        self._span = JsonSpan()
        self._buffer = self._buffer[head.start("opening") :]
        self._state = _State.ARGUMENTS
        return True

    def _step_arguments(self) -> bool:
        end = self._span.advance(self._buffer, 0)
        self._writer.arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not (self._span.done or self._span.broken):
            return False
        self._state = _State.TEXT
        return True

    def _step_list(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if not body:
            return False
        if body.startswith(","):
            inside = body[1:].lstrip(SPACE)
            if not inside:
                return False
            if inside.startswith("{"):
                return self._open_object(self._buffer[: len(self._buffer) - len(inside)], inside)
        elif body.startswith("]"):
            self._buffer = body[1:]
        self._state = _State.TEXT
        return True

    def _give_up(self) -> bool:
        """The marker marks no call: it is text, and what follows it is looked at anew."""
        self._writer.text(MARKER)
        self._state = _State.TEXT
        return True

    def _unfinished(self) -> str:
        return MARKER if self._state is _State.HEAD else ""

    def _is_ending(self, text: str) -> bool:
        return self._state is _State.IN_LIST and text.strip(SPACE) in ("", ",")
