"""A whole response as the events of a stream.

Reference: https://developers.openai.com/api/reference/resources/responses/streaming-events
"""

from __future__ import annotations

from typing import Any, Final

from gateway.assembly.pieces import pieces
from gateway.backends.lenient_json import encoded

_TEXTS: Final = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "summary_text": ("response.reasoning_summary_text", "text"),
}
"""By a part's type: the begin of its events' types, and its field that grows."""
_WRITTEN: Final = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "mcp_call": ("response.mcp_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
    "code_interpreter_call": ("response.code_interpreter_call_code", "code"),
}
"""By an item's type: the same of what is written in it."""
_PARTS: Final = {
    "content": ("response.content_part", "content_index"),
    "summary": ("response.reasoning_summary_part", "summary_index"),
}


def response_events(response: dict[str, Any]) -> list[bytes]:
    return _Events().of(response)


class _Events:
    def __init__(self) -> None:
        self._out: list[bytes] = []

    def of(self, response: dict[str, Any]) -> list[bytes]:
        status, output = response.get("status"), response.get("output")
        begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        begun |= {name: None for name in ("completed_at", "error") if name in response}
        self._emit("response.created", {"response": begun})
        self._emit("response.in_progress", {"response": begun})
        for index, item in enumerate(output if isinstance(output, list) else ()):
            if isinstance(item, dict):
                self._item(index, item)
        last = status if status in ("incomplete", "failed", "cancelled") else "completed"
        self._emit(f"response.{last}", {"response": response})
        return self._out

    def _item(self, index: int, item: dict[str, Any]) -> None:
        place = {"item_id": item.get("id"), "output_index": index}
        begun = dict(item)
        if "status" in item:
            begun["status"] = "in_progress"
        for name in _PARTS:
            if isinstance(item.get(name), list):
                begun[name] = []
        kind = item.get("type")
        event, field = _WRITTEN.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        written = item.get(field)
        if field and isinstance(written, str):
            begun[field] = ""
        self._emit("response.output_item.added", {"output_index": index, "item": begun})
        for name in ("summary", "content"):
            parts = item.get(name)
            for at, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict):
                    self._part(name, place | {_PARTS[name][1]: at}, part)
        if field and isinstance(written, str):
            for piece in pieces(written):
                self._emit(f"{event}.delta", place | {"delta": piece})
            named = {"name": item["name"]} if kind == "function_call" and "name" in item else {}
            self._emit(f"{event}.done", place | named | {field: written})
        self._emit("response.output_item.done", {"output_index": index, "item": item})

    def _part(self, name: str, place: dict[str, Any], part: dict[str, Any]) -> None:
        about, kind = _PARTS[name][0], part.get("type")
        event, field = _TEXTS.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        text = part.get(field)
        if not field or not isinstance(text, str):
            self._emit(f"{about}.added", place | {"part": part})
            self._emit(f"{about}.done", place | {"part": part})
            return
        begun = part | {field: ""}
        for listed in ("annotations", "logprobs"):
            if isinstance(part.get(listed), list):
                begun[listed] = []
        self._emit(f"{about}.added", place | {"part": begun})
        logprobs = part.get("logprobs") if kind == "output_text" else None
        told = logprobs if isinstance(logprobs, list) else []
        for at, piece in enumerate(pieces(text)):
            of_text = {"logprobs": [] if at else told} if kind == "output_text" else {}
            self._emit(f"{event}.delta", place | {"delta": piece} | of_text)
        annotations = part.get("annotations")
        for at, annotation in enumerate(annotations if isinstance(annotations, list) else ()):
            said = {"annotation_index": at, "annotation": annotation}
            self._emit("response.output_text.annotation.added", place | said)
        done = {"logprobs": told} if kind == "output_text" else {}
        self._emit(f"{event}.done", place | {field: text} | done)
        self._emit(f"{about}.done", place | {"part": part})

    def _emit(self, kind: str, said: dict[str, Any]) -> None:
        self._out.append(encoded({"type": kind, "sequence_number": len(self._out), **said}))
