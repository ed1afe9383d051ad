"""Chat completions and completions, put together from the chunks of their streams.

References: https://platform.openai.com/docs/api-reference/chat-streaming,
https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from typing import Any, Final, Literal

from gateway.assembly.merging import Indexed, Merged, Room, extend, grow, merge, settled, size_of, written
from gateway.backends.lenient_json import decoded
from gateway.billing.usage import TokenUsage
from gateway.translation.told_usage import chat_usage

_OF_STREAMS: Final = frozenset(("obfuscation",))
"""What a chunk says for its stream's sake alone."""
_SMALL: Final = 1024
_MOST_SMALL: Final = 64
"""So much of a head has always room: its usage comes when all room may be taken."""
_LATEST: Final = frozenset(("finish_reason", "stop_reason"))
"""Texts of a choice that do not grow."""


class ChatAssembler:
    """An ``Assembler`` of either API."""

    def __init__(self, api: Literal["chat_completions", "completions"], *, limit: int) -> None:
        self._chat = api == "chat_completions"
        self._room = Room(limit)
        self._head: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        """Of the head's members, as far as they are counted."""
        self._latest: dict[str, Any] = {}
        """The latest chunk's head: mostly it says the same as the one before."""
        self._choices: dict[int, Merged] = {}

    @property
    def over(self) -> bool:
        return self._room.over

    def feed(self, event: bytes) -> None:
        chunk = decoded(event)
        if type(chunk) is not dict:
            return
        choices = chunk.pop("choices", None)
        if choices is None and "error" in chunk:
            return
        if chunk != self._latest:
            self._latest = chunk
            self._tell_head(chunk)
        if type(choices) is list:
            for choice in choices:
                if type(choice) is dict:
                    self._grow(choice)

    def whole(self, usage: TokenUsage | None) -> bytes | None:
        if not self._choices:
            return None
        head, kind = self._head, "chat.completion" if self._chat else "text_completion"
        whole = {"id": head.get("id"), "object": kind} | head
        whole["object"] = kind
        whole["choices"] = [self._choice(index) for index in sorted(self._choices)]
        if usage is not None and not whole.get("usage"):
            whole["usage"] = chat_usage(usage)
        return written(whole)

    def _tell_head(self, chunk: dict[str, Any]) -> None:
        head = self._head
        for name, value in chunk.items():
            if value is None:
                head.setdefault(name, None)
            elif head.get(name) != value and name not in _OF_STREAMS:
                self._tell(name, value)

    def _tell(self, name: str, value: object) -> None:
        size = size_of(value)
        if size <= _SMALL and len(self._head) < _MOST_SMALL:
            self._head[name] = value
        elif self._room.takes_bytes(size - self._sizes.get(name, 0)):
            self._head[name] = value
            self._sizes[name] = size

    def _grow(self, said: dict[str, Any]) -> None:
        index, delta, room = said.pop("index", 0), said.pop("delta", None), self._room
        if type(index) is not int:
            index = 0
        choice = self._choices.get(index)
        if choice is None:
            if not room.takes_bytes(2):
                return
            choice = self._choices[index] = Merged()
        if type(delta) is dict:
            self._say(choice, delta)
        for name, value in said.items():
            if value is None:
                choice.setdefault(name, None)
            elif name in _LATEST or type(value) is int:
                if type(value) is not str or len(value) <= 256:
                    choice[name] = value
            elif name == "text" and type(value) is str:
                grow(choice, name, value, room)
            elif not room.over:
                self._tell_of_choice(choice, name, value)

    def _say(self, choice: Merged, delta: dict[str, Any]) -> None:
        message = choice.get("delta")
        if message is None:
            message = choice["delta"] = Merged()
        calls = delta.get("tool_calls")
        if calls and type(calls) is list and type(message.get("tool_calls")) is not Indexed:
            message["tool_calls"] = Indexed()
        merge(message, delta, self._room)

    def _tell_of_choice(self, choice: Merged, name: str, value: Any) -> None:
        room, before = self._room, choice.get(name)
        if name == "logprobs" and type(value) is dict:
            if type(before) is not Merged:
                before = choice[name] = Merged()
            merge(before, value, room)
        elif type(value) is list:
            if type(before) is not list:
                before = choice[name] = []
            extend(before, value, room)
        elif value != before and room.takes(value):
            choice[name] = value

    def _choice(self, index: int) -> dict[str, Any]:
        told: dict[str, Any] = settled(self._choices[index])
        said = told.pop("delta", None)
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            message = {"role": "assistant", "content": None} | (said or told.get("message") or {})
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                message["tool_calls"] = [_without_index(call) for call in calls]
            choice["message"] = message
        else:
            choice["text"] = ""
        choice |= {name: value for name, value in told.items() if name not in choice or name == "text"}
        choice.setdefault("finish_reason", None)
        return choice


def _without_index(call: Any) -> Any:
    return {name: value for name, value in call.items() if name != "index"} if isinstance(call, dict) else call
