"""The items of a response, as they grow, and the events that tell of it.

Reference: https://developers.openai.com/api/reference/resources/responses/streaming-events
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Emit = Callable[[str, dict[str, Any]], None]
"""Sends one event: its type, and what it says."""
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart:
    """One part of a message or of reasoning: a text that grows, then ends."""

    def __init__(self, kind: str, event: str, field: str, place: dict[str, Any], emit: Emit) -> None:
        """``kind``: the part's type. ``event``: begin of its events' types. ``field``: where its text stands."""
        self._kind = kind
        self._event = event
        self._field = field
        self._place = place
        self._emit = emit
        self._pieces: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        self._untold: list[msgspec.Raw] = []
        self._done = False
        emit("response.content_part.added", place | {"part": self.value()})

    def grow(self, text: str, logprobs: list[msgspec.Raw]) -> None:
        self._untold += logprobs
        if not text:
            return
        self._pieces.append(text)
        self._emit(f"{self._event}.delta", self._place | {"delta": text} | self._with_logprobs(self._untold))
        self._logprobs += self._untold
        self._untold = []

    def end(self) -> None:
        if self._done:
            return
        self._done = True
        self._logprobs += self._untold
        self._untold = []
        text = {self._field: "".join(self._pieces)}
        self._emit(f"{self._event}.done", self._place | text | self._with_logprobs(self._logprobs))
        self._emit("response.content_part.done", self._place | {"part": self.value()})

    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = {"type": self._kind, self._field: "".join(self._pieces)}
        if self._kind == "output_text":
            value |= {"annotations": [], "logprobs": self._logprobs}
        return value

    def _with_logprobs(self, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._kind == "output_text" else {}


class _Item:
    prefix = ""

    def __init__(self, hex_id: str, index: int, emit: Emit) -> None:
        """``hex_id``: of the response. ``index``: its place in the output."""
        self.id = f"{self.prefix}_{hex_id}{index:04x}"
        self.status: Status = "in_progress"
        self._index = index
        self._emit = emit

    def value(self) -> dict[str, Any]:
        raise NotImplementedError

    def _begin(self) -> None:
        self._emit("response.output_item.added", {"output_index": self._index, "item": self.value()})

    def _end_parts(self) -> None:
        raise NotImplementedError

    def end(self, status: Status) -> None:
        if self.status == "in_progress":
            self._end_parts()
            self.status = status
            self._emit("response.output_item.done", {"output_index": self._index, "item": self.value()})


class _PartedItem(_Item):
    def __init__(self, hex_id: str, index: int, emit: Emit) -> None:
        super().__init__(hex_id, index, emit)
        self._parts: list[TextPart] = []
        self._kind = ""
        self._begin()

    def _grow(self, kind: str, event: str, field: str, text: str, logprobs: list[msgspec.Raw]) -> None:
        if kind != self._kind:
            self._end_parts()
            self._kind = kind
            place = {"item_id": self.id, "output_index": self._index, "content_index": len(self._parts)}
            self._parts.append(TextPart(kind, event, field, place, self._emit))
        self._parts[-1].grow(text, logprobs)

    def _end_parts(self) -> None:
        if self._parts:
            self._parts[-1].end()

    def _content(self) -> list[dict[str, Any]]:
        return [part.value() for part in self._parts]


class Message(_PartedItem):
    prefix = "msg"

    def say(self, text: str, logprobs: list[msgspec.Raw]) -> None:
        self._grow("output_text", "response.output_text", "text", text, logprobs)

    def refuse(self, text: str) -> None:
        self._grow("refusal", "response.refusal", "refusal", text, [])

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self._content(),
        }


class Reasoning(_PartedItem):
    prefix = "rs"

    def think(self, text: str) -> None:
        self._grow("reasoning_text", "response.reasoning_text", "text", text, [])

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._content(),
            "status": self.status,
        }


class FunctionCall(_Item):
    prefix = "fc"

    def __init__(self, hex_id: str, index: int, emit: Emit, call_id: str | None, name: str) -> None:
        super().__init__(hex_id, index, emit)
        self.call_id = call_id or f"call_{hex_id}{index:04x}"
        self._name = name
        self._pieces: list[str] = []
        self._begin()

    def grow(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(arguments)
            self._emit("response.function_call_arguments.delta", self._place() | {"delta": arguments})

    def _end_parts(self) -> None:
        said = {"name": self._name, "arguments": "".join(self._pieces)}
        self._emit("response.function_call_arguments.done", self._place() | said)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index}

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self._name,
            "arguments": "".join(self._pieces),
        }
