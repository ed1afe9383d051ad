"""A chat completion's answer told as a Message, whole or event by event.

References: https://docs.claude.com/en/api/messages, https://docs.claude.com/en/docs/build-with-claude/streaming and
https://platform.openai.com/docs/api-reference/chat-streaming

Reasoning becomes a thinking block without a signature, a refusal a text with the stop reason ``refusal``. Arguments
that are no JSON object are wrapped as ``{"INVALID_JSON": "..."}``, which is Anthropic's own name for that; a stream
gives them as they came. Where the backend tells no usage, its counts are 0.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.ask import Untranslatable
from gateway.billing.normalise import openai_usage
from gateway.billing.usage import TokenUsage
from gateway.ids import uuid7
from gateway.translation.completion import Call, Completion, Said, read_completion
from gateway.translation.content_blocks import WRAPPED
from gateway.translation.message_blocks import Blocks
from gateway.translation.told_usage import messages_usage

_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
_CALLED = frozenset(("stop", "tool_calls", "function_call"))
"""How an answer that calls tools ends; a call that was forced ends by ``stop``."""


_encode = msgspec.json.encode


class MessagesFromChat:
    """A ``gateway.ask.Translator``; one for each answer."""

    def __init__(self, model: str) -> None:
        """``model``: the name the client asked for."""
        self._model = model
        self._id: str | None = None
        self._usage = TokenUsage()
        self._begun = False
        self._blocks = Blocks()
        self._refused = False
        self._finish: str | None = None
        self._stop: Any = None

    def event(self, data: bytes) -> list[bytes]:
        chunk = read_completion(data)
        if chunk.usage is not None:
            self._usage = openai_usage(chunk.usage, self._usage)
        if not chunk.choices:
            return []
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            self._name(chunk)
            out.append(_encode({"type": "message_start", "message": self._message([], None, None)}))
        for choice in chunk.choices:
            if choice.index:
                continue
            if choice.delta is not None:
                self._say(choice.delta, out)
            if choice.finish_reason:
                self._finish, self._stop = choice.finish_reason, choice.stop_reason
        return out

    def end(self) -> list[bytes]:
        if not self._begun:
            raise Untranslatable("has no choice")
        out: list[bytes] = []
        self._blocks.end(out)
        reason, sequence = self._ending(called=self._blocks.called)
        delta: dict[str, Any] = {"stop_reason": reason, "stop_sequence": sequence}
        if reason == "refusal":
            delta["stop_details"] = _refusal()
        out.append(_encode({"type": "message_delta", "delta": delta, "usage": messages_usage(self._usage)}))
        out.append(b'{"type":"message_stop"}')
        return out

    def whole(self, body: bytes) -> bytes:
        answer = read_completion(body)
        if not answer.choices or answer.choices[0].message is None:
            raise Untranslatable("has no choice")
        choice = answer.choices[0]
        said = choice.message or Said()
        self._name(answer)
        self._usage = openai_usage(answer.usage, self._usage)
        self._finish, self._stop = choice.finish_reason, choice.stop_reason
        content: list[dict[str, Any]] = []
        if said.thought:
            content.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        for text in (said.text, said.refusal):
            if text:
                content.append({"type": "text", "text": text})
        self._refused = bool(said.refusal)
        calls = said.tool_calls or ()
        content += [_tool_use(call, self._blocks.new_id(call.id)) for call in calls]
        reason, sequence = self._ending(called=bool(calls))
        return _encode(self._message(content, reason, sequence))

    def _name(self, answer: Completion) -> None:
        self._id = answer.id if isinstance(answer.id, str) and answer.id else f"msg_{uuid7().hex}"

    def _say(self, said: Said, out: list[bytes]) -> None:
        if thought := said.thought:
            self._blocks.say("thinking", thought, out)
        if text := said.text:
            self._blocks.say("text", text, out)
        if said.refusal:
            self._refused = True
            self._blocks.say("refusal", said.refusal, out)
        for call in said.tool_calls or ():
            function = call.called
            self._blocks.call(call.index or 0, call.id, function.name, function.arguments_text(), out)

    def _ending(self, *, called: bool) -> tuple[str, str | None]:
        """Stop reason and stop sequence. A reason that is not known is passed on as it is."""
        finish = self._finish
        if not finish:
            raise Untranslatable("does not say why it ended")
        if called and finish in _CALLED:
            return "tool_use", None
        if self._refused and finish == "stop":
            return "refusal", None
        if finish == "stop" and isinstance(self._stop, str):
            return "stop_sequence", self._stop
        if finish in _CALLED:
            return "end_turn", None
        return _REASONS.get(finish, finish), None

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": messages_usage(self._usage),
        }
        return message | {"stop_details": _refusal()} if reason == "refusal" else message


def _tool_use(call: Call, id: str) -> dict[str, Any]:
    function = call.called
    if not function.name:
        raise Untranslatable("calls a tool without a name")
    return {"type": "tool_use", "id": id, "name": function.name, "input": _input(function.arguments_text())}


def _input(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    # Kept as the model wrote it: what is decoded and encoded again may have lost digits.
    return msgspec.Raw(text.encode()) if isinstance(value, dict) else {WRAPPED: text}


def _refusal() -> dict[str, Any]:
    return {"type": "refusal", "category": None, "explanation": None}
