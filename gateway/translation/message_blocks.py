"""The content blocks of a streamed Message: one after another, as the API has them.

A call's arguments are streamed as they come. Those of calls that a backend sends at once, a piece of each in turn, wait
until the calls before are complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.ask import Untranslatable
from gateway.ids import uuid7

MAX_LOOKS: Final = 64
"""How often it is tried whether a call's arguments are complete, while others wait: each look reads all of them."""
_encode = msgspec.json.encode


@dataclass(slots=True)
class _Block:
    kind: str
    """``text``, ``refusal`` (a text, too), ``thinking`` or ``tool_use``."""
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    """Of a call all of its arguments; of others, what waits."""
    looks: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing more can come that belongs here."""
        if self.kind != "tool_use":
            return True
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}") or self.looks >= MAX_LOOKS:
            return False
        self.looks += 1
        try:
            msgspec.json.decode("".join(self.pieces))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class Blocks:
    """Appends events to the ``out`` that it is given."""

    def __init__(self) -> None:
        self._at = -1
        """Index of the open block, or of the last one."""
        self._open: _Block | None = None
        self._waiting: deque[_Block] = deque()
        self._calls: dict[int, _Block] = {}
        self.called = False
        """Whether any tool is called."""

    @staticmethod
    def new_id(id: str | None) -> str:
        """The call's own id, or one for it if it has none."""
        return id or f"toolu_{uuid7().hex}"

    def say(self, kind: str, text: str, out: list[bytes]) -> None:
        """``kind``: ``text``, ``refusal`` or ``thinking``."""
        block = self._waiting[-1] if self._waiting else self._open
        if block is None or block.kind != kind:
            block = _Block(kind)
            self._enter(block, out)
        self._add(block, text, out)

    def call(self, index: int, id: str | None, name: str | None, arguments: str, out: list[bytes]) -> None:
        """A piece of the call of that index. Some servers give every call the index 0, and an id of its own."""
        block = self._calls.get(index)
        if block is None or (id and name and block.name and id != block.id):
            block = self._calls[index] = _Block("tool_use")
            self.called = True
        if name and not block.name:
            block.name, block.id = name, self.new_id(id or block.id)
            self._enter(block, out)
        elif id and not block.id:
            block.id = id
        if arguments:
            self._add(block, arguments, out)

    def end(self, out: list[bytes]) -> None:
        """Raises Untranslatable for a call that never got a name."""
        if not all(block.name for block in self._calls.values()):
            raise Untranslatable("calls a tool without a name")
        while self._open is not None:
            self._close(out)

    def _enter(self, block: _Block, out: list[bytes]) -> None:
        """Let ``block`` be the next one, as soon as may be."""
        self._waiting.append(block)
        self._go_on(out)

    def _add(self, block: _Block, text: str, out: list[bytes]) -> None:
        if block is not self._open:
            block.pieces.append(text)
            return
        if block.kind == "tool_use":
            block.pieces.append(text)
        out.append(self._delta(block, text))
        if self._waiting:
            self._go_on(out)

    def _go_on(self, out: list[bytes]) -> None:
        """Open what waits, for as long as what is before it is complete."""
        while self._waiting and (self._open is None or self._open.complete):
            self._close(out)

    def _close(self, out: list[bytes]) -> None:
        """Close the open block, if there is one; open the next, if there is one."""
        if self._open is not None:
            out.append(b'{"type":"content_block_stop","index":%d}' % self._at)
            self._open = None
        if not self._waiting:
            return
        block = self._open = self._waiting.popleft()
        self._at += 1
        empty: dict[str, Any]
        if block.kind == "tool_use":
            empty = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        elif block.kind == "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            empty = {"type": "text", "text": ""}
        out.append(_encode({"type": "content_block_start", "index": self._at, "content_block": empty}))
        if block.pieces:
            out.append(self._delta(block, "".join(block.pieces)))

    def _delta(self, block: _Block, text: str) -> bytes:
        if block.kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == "thinking":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return _encode({"type": "content_block_delta", "index": self._at, "delta": delta})
