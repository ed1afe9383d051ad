"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call."""

from __future__ import annotations

from typing import Final

from worker.server.tools.buffered import BufferedParser
from worker.server.tools.call_object import CallObject

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


class HermesParser(BufferedParser):
    """See the module. The closing tag may be missing, where the model forgot it or was cut off."""

    _unclosed = False

    def _step(self) -> bool:
        marker = self._text_until((OPENING, CLOSING) if self._unclosed else (OPENING,))
        if marker is None:
            return False
        self._buffer = self._buffer[len(marker) :]
        self._unclosed = False
        if marker == OPENING:
            self._begin_object(OPENING, marked=True)
        else:
            self._writer.skip_space()
        return True

    def _after_object(self, ended: CallObject) -> None:
        self._unclosed = ended.begun

    def _is_ending(self, text: str) -> bool:
        return self._unclosed and CLOSING.startswith(text)
