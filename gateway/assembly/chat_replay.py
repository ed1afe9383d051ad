"""Whole chat completions and completions as the chunks of a stream.

References: https://platform.openai.com/docs/api-reference/chat-streaming,
https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from typing import Any, Final

from gateway.assembly.pieces import pieces
from gateway.backends.lenient_json import encoded

_HEAD: Final = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier"))
"""What each chunk repeats."""
_TEXTS: Final = ("reasoning_content", "reasoning", "content", "refusal")
"""Of a message, in the order in which they are told."""
_OF_END: Final = frozenset(("index", "message", "text", "logprobs", "finish_reason"))
"""What of a choice has a place of its own; the rest is told with the reason to finish."""


def chat_events(answer: dict[str, Any], *, include_usage: bool) -> list[bytes]:
    return _Chunks(answer, "chat.completion.chunk").chat(include_usage=include_usage)


def completion_events(answer: dict[str, Any], *, include_usage: bool) -> list[bytes]:
    return _Chunks(answer, "text_completion").completion(include_usage=include_usage)


class _Chunks:
    def __init__(self, answer: dict[str, Any], kind: str) -> None:
        self._usage = answer.get("usage")
        choices = answer.get("choices")
        self._choices = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
        self._head = {name: value for name, value in answer.items() if name in _HEAD} | {"object": kind}
        self._once = {
            name: value for name, value in answer.items() if name not in _HEAD and name not in ("choices", "usage")
        }
        """What is told in the first chunk alone."""
        self._out: list[bytes] = []

    def chat(self, *, include_usage: bool) -> list[bytes]:
        for at, choice in enumerate(self._choices):
            self._chunk(choice, at, {"delta": _role(_message(choice))})
        for at, choice in enumerate(self._choices):
            self._say(choice, at)
        return self._ended(include_usage=include_usage)

    def completion(self, *, include_usage: bool) -> list[bytes]:
        for at, choice in enumerate(self._choices):
            text, logprobs = choice.get("text"), choice.get("logprobs")
            for piece in (pieces(text) if isinstance(text, str) else []) or [""]:
                self._chunk(choice, at, {"text": piece}, logprobs=logprobs)
                logprobs = None
            if (ended := _ending(choice)) is not None:
                self._chunk(choice, at, {"text": ""} | ended)
        return self._ended(include_usage=include_usage)

    def _say(self, choice: dict[str, Any], at: int) -> None:
        message, logprobs = _message(choice), choice.get("logprobs")
        rest = dict(logprobs) if isinstance(logprobs, dict) else {}
        for name in _TEXTS:
            text = message.get(name)
            tokens = rest.get(name) if name in ("content", "refusal") else None
            if isinstance(text, str):
                for piece, of_piece in _with_tokens(text, tokens):
                    if of_piece:
                        told: dict[str, Any] = {other: None for other in rest} | {name: of_piece}
                        rest[name] = []
                        self._chunk(choice, at, {"delta": {name: piece}}, logprobs=told)
                    else:
                        self._chunk(choice, at, {"delta": {name: piece}})
            elif text is not None:
                self._chunk(choice, at, {"delta": {name: text}})
        calls = message.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            self._call(choice, at, index, call)
        call = message.get("function_call")
        if isinstance(call, dict):
            for piece in pieces(call["arguments"]) if isinstance(call.get("arguments"), str) else ():
                self._chunk(choice, at, {"delta": {"function_call": {"arguments": piece}}})
        ended = _ending(choice)
        if ended is not None or rest:
            self._chunk(
                choice, at, {"delta": {}} | (ended or {}), logprobs=rest if isinstance(logprobs, dict) else None
            )

    def _call(self, choice: dict[str, Any], at: int, index: int, call: Any) -> None:
        if not isinstance(call, dict):
            return
        kind = "custom" if isinstance(call.get("custom"), dict) else "function"
        field = "input" if kind == "custom" else "arguments"
        called = call.get(kind)
        written = called.get(field) if isinstance(called, dict) else None
        begin: dict[str, Any] = {"index": index, **call}
        if isinstance(called, dict) and isinstance(written, str):
            begin[kind] = called | {field: ""}
        self._chunk(choice, at, {"delta": {"tool_calls": [begin]}})
        for piece in pieces(written) if isinstance(written, str) else ():
            self._chunk(choice, at, {"delta": {"tool_calls": [{"index": index, kind: {field: piece}}]}})

    def _chunk(self, choice: dict[str, Any], at: int, said: dict[str, Any], *, logprobs: Any = None) -> None:
        index = choice.get("index")
        told = {"index": index if isinstance(index, int) else at, **said}
        if "logprobs" in choice:
            told["logprobs"] = logprobs
        told.setdefault("finish_reason", None)
        self._out.append(encoded(self._head | self._once | {"choices": [told]}))
        self._once = {}

    def _ended(self, *, include_usage: bool) -> list[bytes]:
        if include_usage and isinstance(self._usage, dict):
            self._out.append(encoded(self._head | {"choices": [], "usage": self._usage}))
        return self._out


def _role(message: dict[str, Any]) -> dict[str, Any]:
    """What a choice's first chunk says: all but the texts and calls that are told piece by piece."""
    role = {"role": "assistant"} | message
    for name in _TEXTS:
        if name in role and role[name] is not None:
            if name == "content":
                role[name] = "" if isinstance(role[name], str) else None
            elif role[name] != "":
                del role[name]
    if role.get("tool_calls"):
        del role["tool_calls"]
    call = role.get("function_call")
    if isinstance(call, dict) and isinstance(call.get("arguments"), str):
        role["function_call"] = call | {"arguments": ""}
    return role


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, dict) else {}


def _ending(choice: dict[str, Any]) -> dict[str, Any] | None:
    """What the last chunk of a choice says. None: nothing, as of an answer that was cut."""
    rest = {name: value for name, value in choice.items() if name not in _OF_END}
    finish = choice.get("finish_reason")
    return None if finish is None and not rest else rest | {"finish_reason": finish}


def _with_tokens(text: str, tokens: Any) -> list[tuple[str, list[Any]]]:
    """Pieces of the text, each with the log-probabilities of its tokens, if these are the text's."""
    cut = pieces(text)
    if not isinstance(tokens, list) or not tokens:
        return [(piece, []) for piece in cut]
    told = [token.get("token") if isinstance(token, dict) else None for token in tokens]
    words = [word for word in told if isinstance(word, str)]
    if len(words) == len(tokens) and "".join(words) == text:
        group = max(4, -(-len(words) // 256))
        places = range(0, len(words), group)
        return [("".join(words[place : place + group]), tokens[place : place + group]) for place in places]
    return [(piece, [] if at else tokens) for at, piece in enumerate(cut)]
