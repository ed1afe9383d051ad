"""Llama 3: ``{"name": ..., "parameters": {...}}``, several with ``;`` between them, ``<|python_tag|>`` before or not.

Reference: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

from __future__ import annotations

from typing import Final

from worker.server.tools.buffered import BufferedParser
from worker.server.tools.call_object import CallObject
from worker.server.tools.json_span import SPACE, JsonSpan

TAG: Final = "<|python_tag|>"


class Llama3Parser(BufferedParser):
    """See the module. Nothing but its form tells a call from other JSON, so an object that has keys which calls do
    not have, or the name of no tool, is text, and so is all that is inside of it. After the tag, what is no object is
    text as well."""

    separators = ";"
    _tagged = False
    _other: JsonSpan | None = None
    """JSON that is no call, while it lasts."""

    def _step(self) -> bool:
        if self._other is not None:
            end = self._other.advance(self._buffer, 0)
            self._writer.text(self._buffer[:end])
            self._buffer = self._buffer[end:]
            if not (self._other.done or self._other.broken):
                return False
            self._other = None
        if self._tagged:
            return self._step_tagged()
        marker = self._text_until((TAG, "{"))
        if marker is None:
            return False
        if marker == TAG:
            self._tagged = True
            self._buffer = self._buffer[len(TAG) :]
        else:
            self._begin_object("", marked=False)
        return True

    def _step_tagged(self) -> bool:
        body = self._buffer.lstrip(SPACE)
        if not body:
            return False
        self._tagged = False
        prefix = TAG + self._buffer[: len(self._buffer) - len(body)]
        self._buffer = body
        if body.startswith("{"):
            self._begin_object(prefix, marked=True)
        else:
            self._writer.text(prefix)
        return True

    def _after_object(self, ended: CallObject) -> None:
        if ended.is_other:
            self._other = JsonSpan()
            self._other.advance(ended.held, 0)

    def _unfinished(self) -> str:
        return TAG if self._tagged else ""
