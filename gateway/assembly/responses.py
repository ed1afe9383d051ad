"""A response, put together from the events of its stream.

The last event bears the whole of it; what came before counts for an answer that was broken off.
Reference: https://developers.openai.com/api/reference/resources/responses/streaming-events
"""

from __future__ import annotations

from typing import Any, Final

from gateway.assembly.merging import Indexed, Merged, Room, Text, grow, settled, written
from gateway.backends.lenient_json import decoded
from gateway.billing.usage import TokenUsage
from gateway.translation.told_usage import responses_usage

_LAST: Final = frozenset(("response.completed", "response.incomplete", "response.failed", "response.cancelled"))
_HEADS: Final = frozenset(("response.created", "response.queued", "response.in_progress"))
_GROWS: Final[dict[str, tuple[str, str]]] = {
    "response.output_text": ("content", "text"),
    "response.refusal": ("content", "refusal"),
    "response.reasoning_text": ("content", "text"),
    "response.reasoning_summary_text": ("summary", "text"),
    "response.function_call_arguments": ("", "arguments"),
    "response.mcp_call_arguments": ("", "arguments"),
    "response.custom_tool_call_input": ("", "input"),
    "response.code_interpreter_call_code": ("", "code"),
}
"""By the begin of an event's type: in which list of an item the part stands that grows, and its field that does."""
_PARTS: Final = {"response.content_part": "content", "response.reasoning_summary_part": "summary"}


class ResponsesAssembler:
    """An ``Assembler``."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._room = Room(limit)
        self._head: dict[str, Any] | None = None
        self._items: dict[int, Merged] = {}
        self._whole: bytes | None = None
        """As the last event told it."""
        self._over = False

    @property
    def over(self) -> bool:
        return self._over or self._room.over

    def feed(self, event: bytes) -> None:
        said = decoded(event)
        if type(said) is not dict:
            return
        kind = said.get("type")
        if type(kind) is not str:
            return
        about, _, what = kind.rpartition(".")
        if what == "delta" or (what == "done" and about in _GROWS):
            self._text(about, said, done=what == "done")
        elif kind in _HEADS or kind in _LAST:
            self._tell(said.get("response"), last=kind in _LAST)
        elif about == "response.output_item":
            self._item(_int(said, "output_index"), said.get("item"))
        elif about in _PARTS:
            self._part(_PARTS[about], said)
        elif kind == "response.output_text.annotation.added":
            self._annotation(said)

    def whole(self, usage: TokenUsage | None) -> bytes | None:
        if self._whole is not None:
            return self._whole
        if self._head is None and not self._items:
            return None
        whole = {"id": None, "object": "response"} | (self._head or {})
        whole["output"] = [settled(self._items[index]) for index in sorted(self._items)]
        if usage is not None and not whole.get("usage"):
            whole["usage"] = responses_usage(usage)
        return written(whole)

    def _tell(self, response: Any, *, last: bool) -> None:
        if type(response) is not dict:
            return
        told = written(response)
        if told is None:
            return
        if last and len(told) <= self._limit:
            self._whole = told
            self._items.clear()
            return
        self._over = self._over or last
        response.pop("output", None)
        if self._head is not None or self._room.takes_bytes(min(len(told), self._room.left)):
            self._head = response

    def _item(self, index: int, item: Any) -> None:
        if type(item) is not dict:
            return
        known = self._items.get(index)
        if known is None:
            if not self._room.takes(item):
                return
            known = self._items[index] = Merged()
        elif not self._room.over:
            # Its texts were counted as they came.
            known.clear()
        else:
            # Cut already: only what is no content is news.
            if type(item.get("status")) is str:
                known["status"] = item["status"]
            return
        known.update(item)
        for name in ("content", "summary"):
            parts = item.get(name)
            if type(parts) is list:
                known[name] = Indexed(enumerate(map(_growing, parts)))

    def _part(self, name: str, said: dict[str, Any]) -> None:
        item, part = self._items.get(_int(said, "output_index")), said.get("part")
        if item is None or type(part) is not dict or self._room.over:
            return
        parts = item.get(name)
        if type(parts) is not Indexed:
            parts = item[name] = Indexed()
        at = _place(said, name)
        if at in parts or self._room.takes(part):
            parts[at] = _growing(part)

    def _text(self, about: str, said: dict[str, Any], *, done: bool) -> None:
        where, field = _GROWS.get(about, ("", ""))
        grows = self._items.get(_int(said, "output_index"))
        if where and grows is not None:
            parts = grows.get(where)
            grows = parts.get(_place(said, where)) if type(parts) is Indexed else None
        text = said.get(field if done else "delta")
        if not field or type(text) is not str or type(grows) is not Merged:
            return
        if done:
            # The same text again, unless its pieces were never told.
            if not grows.get(field):
                grow(grows, field, text, self._room)
            return
        if type(grows.get(field)) is str:
            grows[field] = Text((grows[field],))
        grow(grows, field, text, self._room)
        logprobs = said.get("logprobs")
        if type(logprobs) is list and logprobs and not self._room.over and self._room.takes(logprobs):
            known = grows.get("logprobs")
            grows["logprobs"] = known = known if type(known) is list else []
            known += logprobs

    def _annotation(self, said: dict[str, Any]) -> None:
        item = self._items.get(_int(said, "output_index"))
        parts = item.get("content") if item is not None else None
        part = parts.get(_place(said, "content")) if type(parts) is Indexed else None
        if type(part) is Merged and "annotation" in said and self._room.takes(said["annotation"]):
            known = part.get("annotations")
            part["annotations"] = known = known if type(known) is list else []
            known.append(said["annotation"])


def _growing(part: Any) -> Any:
    return Merged(part) if type(part) is dict else part


def _place(said: dict[str, Any], where: str) -> int:
    return _int(said, "content_index" if where == "content" else "summary_index")


def _int(said: dict[str, Any], name: str) -> int:
    value = said.get(name)
    return value if type(value) is int else 0
