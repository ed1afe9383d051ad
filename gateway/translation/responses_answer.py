"""A chat completion's answer as a response, whole or as the events of a stream; both are made by the same steps.

Reference: https://developers.openai.com/api/reference/resources/responses/streaming-events
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from gateway.ask import Body, Untranslatable
from gateway.billing.normalise import openai_usage
from gateway.billing.usage import TokenUsage
from gateway.translation.completion import Call, Choice, read_completion
from gateway.translation.responses_fields import NULL
from gateway.translation.responses_output import FunctionCall, Message, Reasoning
from gateway.translation.told_usage import responses_usage

EVENT_PREFIX: Final = b'{"type":"'
"""With it begins each event; what follows, up to a quotation mark, is its type."""
LAST_EVENTS: Final = frozenset(("response.completed", "response.incomplete"))
_FINISHED: Final = frozenset(("stop", "tool_calls", "function_call"))
"""Finish reasons of an answer that is complete; all others cut it short."""
_UNFINISHED: Final = {"length": "max_output_tokens"}
"""What the Responses API calls them, if not the same."""


_Text = TypeVar("_Text", Message, Reasoning)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a response says beside its output."""

    hex_id: str
    """32 hex digits, of which all its ids are made."""
    model: str
    """As it was asked for."""
    created_at: int
    """Unix seconds."""
    echo: Body
    """Fields of the request that it repeats."""

    @property
    def id(self) -> str:
        return response_id(self.hex_id)


def response_id(hex_id: str) -> str:
    return f"resp_{hex_id}"


class ResponsesAnswer:
    """A ``Translator``."""

    def __init__(self, frame: Frame, now: Callable[[], int]) -> None:
        """``now``: Unix seconds."""
        self._frame = frame
        self._now = now
        self._events: list[bytes] = []
        self._sequence = 0
        self._begun = False
        self._items: list[Message | Reasoning | FunctionCall] = []
        self._calls: dict[int, FunctionCall] = {}
        self._finish: str | None = None
        self._usage: TokenUsage | None = None
        self._tier = NULL

    def event(self, data: bytes) -> list[bytes]:
        self._take(data)
        return self._emitted()

    def end(self) -> list[bytes]:
        self._end()
        return self._emitted()

    def whole(self, body: bytes) -> bytes:
        self._take(body)
        self._end()
        return msgspec.json.encode(self._response(self._status()))

    def _take(self, data: bytes) -> None:
        chunk = read_completion(data)
        if isinstance(chunk.usage, dict):
            self._usage = openai_usage(chunk.usage, self._usage or TokenUsage())
        if chunk.service_tier != NULL:
            self._tier = chunk.service_tier
        for choice in chunk.choices or ():
            if not choice.index:
                self._begin()
                self._grow(choice)
                self._finish = choice.finish_reason or self._finish

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                self._emit(kind, {"response": self._response("in_progress")})

    def _grow(self, choice: Choice) -> None:
        said = choice.delta or choice.message
        if said is None:
            return
        if thought := said.thought:
            self._open(Reasoning).think(thought)
        text, logprobs = said.text, (choice.logprobs.content if choice.logprobs else None) or []
        if text or (logprobs and not said.refusal):
            self._open(Message).say(text, logprobs)
        if said.refusal:
            self._open(Message).refuse(said.refusal)
        for call in said.tool_calls or ():
            self._call(call)
        if said.function_call is not None:
            self._call(Call(index=0, function=said.function_call))

    def _open(self, kind: type[_Text]) -> _Text:
        """The item that grows, if it is of that kind; else a new one. Calls stay open beside it."""
        last = self._items[-1] if self._items else None
        if isinstance(last, kind):
            return last
        self._close_text()
        item = kind(self._frame.hex_id, len(self._items), self._emit)
        self._items.append(item)
        return item

    def _close_text(self) -> None:
        if self._items and not isinstance(self._items[-1], FunctionCall):
            self._items[-1].end("completed")

    def _call(self, call: Call) -> None:
        """Pieces of several calls may come in turn, so that each stays open until the end. Some servers leave the index
        out, or give every call the same; a new call bears an id of its own."""
        index, function = call.index, call.called
        if index is None:
            latest = max(self._calls, default=-1)
            goes_on = latest in self._calls and (not call.id or call.id == self._calls[latest].call_id)
            index = latest if goes_on else latest + 1
        item = self._calls.get(index)
        if item is None or (call.id and function.name and call.id != item.call_id):
            if not function.name:
                raise Untranslatable("calls a function without a name")
            self._close_text()
            item = FunctionCall(self._frame.hex_id, len(self._items), self._emit, call.id, function.name)
            self._items.append(item)
            self._calls[index] = item
        item.grow(function.arguments_text())

    def _end(self) -> None:
        if not self._begun:
            raise Untranslatable("has no choice")
        if not self._finish:
            raise Untranslatable("does not say why it ended")
        if not self._items:
            self._open(Message).say("", [])
        status = self._status()
        for item in self._items:
            item.end(status if item is self._items[-1] else "completed")
        self._emit(f"response.{status}", {"response": self._response(status)})

    def _status(self) -> Literal["completed", "incomplete"]:
        return "completed" if self._finish in _FINISHED else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        frame, done = self._frame, status != "in_progress"
        reason = _UNFINISHED.get(self._finish or "", self._finish) if status == "incomplete" else None
        response: dict[str, Any] = {
            "id": frame.id,
            "object": "response",
            "created_at": frame.created_at,
            "status": status,
            "background": False,
            "completed_at": self._now() if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": reason} if reason is not None else None,
            **_DEFAULTS,
            **frame.echo,
            "model": frame.model,
            "output": [item.value() for item in self._items] if done else [],
            "usage": responses_usage(self._usage) if done and self._usage is not None else None,
        }
        if self._tier != NULL:
            response["service_tier"] = self._tier
        return response

    def _emit(self, kind: str, said: dict[str, Any]) -> None:
        self._events.append(msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **said}))
        self._sequence += 1

    def _emitted(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


_DEFAULTS: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": None,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}
"""What a response says of fields that the request leaves out."""
