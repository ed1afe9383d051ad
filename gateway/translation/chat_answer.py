"""An answer of Anthropic's Messages API as a chat completion, whole or as the chunks of a stream.

What only Anthropic's own tools say, signatures of thoughts and citations have no place there and are left out.
References: https://platform.claude.com/docs/en/build-with-claude/streaming,
https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.ask import Untranslatable
from gateway.billing.normalise import anthropic_usage
from gateway.billing.usage import TokenUsage
from gateway.translation.told_usage import chat_usage

_NULL: Final = msgspec.Raw(b"null")
_FINISHED: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Stop reasons, and the finish reasons that say the same; one that is not known here is told as it is."""


class _StopDetails(msgspec.Struct):
    explanation: str | None = None


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _NULL


class _Message(msgspec.Struct):
    id: str | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None
    stop_details: _StopDetails | None = None
    usage: Any = None


class _Delta(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_details: _StopDetails | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: Any = None


class _Typed(msgspec.Struct):
    type: str


_KNOWN: Final = frozenset(
    (
        *("message_start", "message_delta", "message_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
    )
)
_typed_decoder = msgspec.json.Decoder(_Typed)
_event_decoder = msgspec.json.Decoder(_Event)
_message_decoder = msgspec.json.Decoder(_Message)


@dataclass(slots=True)
class _OpenCall:
    """A call whose input is still coming."""

    index: int
    given: bytes
    """Its input as the block began; it counts if nothing comes behind it."""
    told: bool = False


@dataclass(slots=True)
class ChatAnswer:
    """A ``Translator``; one for each answer."""

    model: str
    """What the answer is to call its model."""
    created: int
    """Unix seconds."""
    include_usage: bool = False
    """Whether a stream ends with a chunk that tells usage."""
    legacy: bool = False
    """Whether the client knows ``function_call`` instead of ``tool_calls``."""
    _id: str = ""
    _begun: bool = False
    _usage: TokenUsage = field(default_factory=TokenUsage)
    _calls: int = 0
    _open: dict[int, _OpenCall] = field(default_factory=dict)
    """By the index of their block."""
    _stop_reason: str | None = None
    _explanation: str | None = None

    def event(self, data: bytes) -> list[bytes]:
        event = _known(data)
        if event is None:
            return []
        match event.type:
            case "message_start":
                if event.message is not None:
                    self._id = event.message.id or ""
                    self._usage = anthropic_usage(event.message.usage, self._usage)
            case "content_block_start" if event.content_block is not None:
                return self._begin_block(event.index, event.content_block)
            case "content_block_delta" if event.delta is not None:
                return self._continue_block(event.index, event.delta)
            case "content_block_stop":
                return self._end_block(event.index)
            case "message_delta":
                self._usage = anthropic_usage(event.usage, self._usage)
                if event.delta is not None:
                    self._stop_reason = event.delta.stop_reason or self._stop_reason
                    if event.delta.stop_details is not None:
                        self._explanation = event.delta.stop_details.explanation
        return []

    def end(self) -> list[bytes]:
        chunks = [] if self._begun else [self._role("")]
        for index in list(self._open):
            chunks += self._end_block(index)
        if self._explanation:
            chunks.append(self._chunk({"refusal": self._explanation}))
        chunks.append(self._chunk({}, finish=self._finish(self._stop_reason)))
        if self.include_usage:
            chunks.append(
                msgspec.json.encode(
                    self._head("chat.completion.chunk") | {"choices": [], "usage": chat_usage(self._usage)}
                )
            )
        return chunks

    def whole(self, body: bytes) -> bytes:
        answer = _read(_message_decoder, body)
        if answer.content is None:
            raise Untranslatable("has no content")
        self._id = answer.id or ""
        self._usage = anthropic_usage(answer.usage, self._usage)
        texts = [block.text or "" for block in answer.content if block.type == "text"]
        thoughts = [block.thinking or "" for block in answer.content if block.type == "thinking"]
        calls = [_call(block) for block in answer.content if block.type == "tool_use"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(texts) if texts or not (thoughts or calls) else None,
            "refusal": None if answer.stop_details is None else answer.stop_details.explanation,
        }
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls and self.legacy:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish(answer.stop_reason)}
        return msgspec.json.encode(
            self._head("chat.completion") | {"choices": [choice], "usage": chat_usage(self._usage)}
        )

    def _begin_block(self, at: int, block: _Block) -> list[bytes]:
        if block.type not in ("text", "thinking", "tool_use"):
            return []
        chunks = [] if self._begun else [self._role("" if block.type == "text" else None)]
        if block.type == "text" and block.text:
            chunks.append(self._chunk({"content": block.text}))
        elif block.type == "thinking" and block.thinking:
            chunks.append(self._chunk({"reasoning_content": block.thinking}))
        elif block.type == "tool_use":
            call = self._open[at] = _OpenCall(self._calls, bytes(block.input))
            self._calls += 1
            function = {"name": block.name or "", "arguments": ""}
            chunks += self._called(call, {"id": block.id or "", "type": "function", "function": function})
        return chunks

    def _continue_block(self, at: int, delta: _Delta) -> list[bytes]:
        if delta.type == "text_delta" and delta.text:
            return [self._chunk({"content": delta.text})]
        if delta.type == "thinking_delta" and delta.thinking:
            return [self._chunk({"reasoning_content": delta.thinking})]
        if delta.type == "input_json_delta" and delta.partial_json and (call := self._open.get(at)) is not None:
            call.told = True
            return self._called(call, {"function": {"arguments": delta.partial_json}})
        return []

    def _end_block(self, at: int) -> list[bytes]:
        call = self._open.pop(at, None)
        if call is None or call.told:
            return []
        return self._called(call, {"function": {"arguments": _arguments(call.given)}})

    def _called(self, call: _OpenCall, what: dict[str, Any]) -> list[bytes]:
        if not self.legacy:
            return [self._chunk({"tool_calls": [{"index": call.index} | what]})]
        return [self._chunk({"function_call": what["function"]})] if call.index == 0 else []

    def _role(self, content: str | None) -> bytes:
        self._begun = True
        return self._chunk({"role": "assistant", "content": content})

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return msgspec.json.encode(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self.created, "model": self.model}

    def _finish(self, stop_reason: str | None) -> str:
        if not stop_reason:
            raise Untranslatable("does not say why it ended")
        finish = _FINISHED.get(stop_reason, stop_reason)
        return "function_call" if self.legacy and finish == "tool_calls" else finish


def _call(block: _Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": _arguments(bytes(block.input))}
    return {"id": block.id or "", "type": "function", "function": function}


def _arguments(given: bytes) -> str:
    return "{}" if given == b"null" else given.decode()


def _known(data: bytes) -> _Event | None:
    """None for an event of a type that came up later: it may be anything. Raises Untranslatable."""
    try:
        event: _Event = _read(_event_decoder, data)
    except Untranslatable:
        if _read(_typed_decoder, data).type in _KNOWN:
            raise
        return None
    return event


def _read(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as fault:
        raise Untranslatable(f"is not as the Messages API has it: {fault}") from None
    except (msgspec.DecodeError, RecursionError):
        raise Untranslatable("is not JSON") from None
