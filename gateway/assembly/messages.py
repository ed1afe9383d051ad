"""A message of Anthropic's API, put together from the events of its stream.

Reference: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.assembly.merging import Merged, Room, Text, grow, merge, settled, written
from gateway.backends.lenient_json import decoded
from gateway.billing.usage import TokenUsage
from gateway.translation.content_blocks import WRAPPED
from gateway.translation.told_usage import messages_usage

_INPUT: Final = "partial_json"


class MessagesAssembler:
    """An ``Assembler``."""

    def __init__(self, *, limit: int) -> None:
        self._room = Room(limit)
        self._head: dict[str, Any] | None = None
        self._blocks: dict[int, Merged] = {}
        self._usage: dict[str, Any] = {}
        self._ended = False
        """Whether the stream told what the whole answer used."""

    @property
    def over(self) -> bool:
        return self._room.over

    def feed(self, event: bytes) -> None:
        said = decoded(event)
        if type(said) is not dict:
            return
        kind = said.get("type")
        if kind == "content_block_delta":
            block, delta = self._blocks.get(_index(said)), said.get("delta")
            if block is not None and type(delta) is dict:
                self._continue(block, delta)
        elif kind == "content_block_start":
            self._begin_block(_index(said), said.get("content_block"))
        elif kind == "message_start":
            self._begin(said.get("message"))
        elif kind == "message_delta":
            self._end(said)

    def whole(self, usage: TokenUsage | None) -> bytes | None:
        if self._head is None:
            return None
        whole = {"id": None, "type": "message", "role": "assistant"} | self._head
        whole["content"] = [_block(self._blocks[index]) for index in sorted(self._blocks)]
        if usage is not None and not self._ended:
            whole["usage"] = self._usage | messages_usage(usage)
        else:
            whole["usage"] = self._usage
        return written({"stop_reason": None, "stop_sequence": None} | whole)

    def _begin(self, message: Any) -> None:
        if type(message) is not dict:
            return
        self._head = message if self._room.takes(message) else {}
        self._usage = _object(self._head.pop("usage", None))
        content = self._head.pop("content", None)
        for index, block in enumerate(content if type(content) is list else ()):
            self._begin_block(index, block)

    def _begin_block(self, index: int, given: Any) -> None:
        if type(given) is not dict or not self._room.takes_bytes(2):
            return
        block = self._blocks[index] = Merged()
        # An input stands as it is unless pieces of one come.
        input = given.pop("input", None) if "input" in given else msgspec.UNSET
        merge(block, given, self._room)
        if input is not msgspec.UNSET and self._room.takes(input):
            block["input"] = input

    def _continue(self, block: Merged, delta: dict[str, Any]) -> None:
        kind = delta.get("type")
        if kind == "citations_delta":
            citations = block.get("citations")
            if type(citations) is not list:
                citations = block["citations"] = []
            if "citation" in delta and self._room.takes(delta["citation"]):
                citations.append(delta["citation"])
            return
        if kind == "signature_delta":
            block["signature"] = Text()
        for name, value in delta.items():
            if type(value) is str:
                if name != "type":
                    grow(block, name, value, self._room)
            elif name != "type" and value is not None and self._room.takes(value):
                block[name] = value

    def _end(self, said: dict[str, Any]) -> None:
        delta, usage = said.pop("delta", None), said.pop("usage", None)
        if self._head is None:
            self._head = {}
        for name, value in _object(usage).items():
            if value is not None or name not in self._usage:
                self._usage[name] = value
                self._ended = True
        # What stands beside it, as how a context was edited, is the message's, too.
        for name, value in (_object(delta) | said).items():
            if name != "type" and len(self._head) < 64:
                self._head[name] = value


def _block(merged: Merged) -> dict[str, Any]:
    block: dict[str, Any] = settled(merged)
    arguments = block.pop(_INPUT, "")
    if isinstance(arguments, str) and arguments.strip():
        value = decoded(arguments.encode(errors="replace"))
        block["input"] = value if isinstance(value, dict) else {WRAPPED: arguments}
    return block


def _index(event: dict[str, Any]) -> int:
    index = event.get("index")
    return index if type(index) is int else 0


def _object(value: Any) -> dict[str, Any]:
    return value if type(value) is dict else {}
