"""Chat completions and completions told the other way: a whole answer as a stream's events, a stream as a whole.

For servers that answer in the one way though they were asked for the other.
Reference: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from typing import Any, Final

from gateway.backends.lenient_json import decoded, encoded

_TOLD_ONCE: Final = frozenset(("id", "index", "role", "type", "object", "model", "system_fingerprint", "service_tier"))
"""Text that each chunk repeats whole; other text is told piece by piece."""


def events_of(answer: dict[str, Any], *, include_usage: bool) -> list[bytes]:
    """A whole answer as chunks: one with all that was said, then one of usage if it is wanted and told."""
    choices = answer.get("choices")
    usage = answer.pop("usage", None)
    chunk = dict(answer)
    if answer.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    chunk["choices"] = [_chunk_choice(each) for each in choices] if isinstance(choices, list) else []
    events = [encoded(chunk)]
    if include_usage and isinstance(usage, dict):
        events.append(encoded(chunk | {"choices": [], "usage": usage}))
    return events


class Gathered:
    """The whole answer that a stream's chunks come to, put together as they come."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = {}
        """None: what came were no chunks."""

    def add(self, data: bytes) -> None:
        chunk = decoded(data)
        known = self._whole is not None and isinstance(chunk, dict)
        self._whole = _merged(self._whole or {}, chunk) if known else None

    def whole(self) -> bytes | None:
        """None if the chunks were none."""
        whole = self._whole or {}
        choices = whole.get("choices")
        if not isinstance(choices, list):
            return None
        if whole.get("object") == "chat.completion.chunk":
            whole["object"] = "chat.completion"
        whole["choices"] = [_whole_choice(each) for each in choices]
        return encoded(whole)


def _chunk_choice(choice: object) -> object:
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        return choice
    delta = dict(choice["message"])
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [
            {"index": place, **call} if isinstance(call, dict) else call for place, call in enumerate(calls)
        ]
    return {("delta" if name == "message" else name): (delta if name == "message" else choice[name]) for name in choice}


def _whole_choice(choice: object) -> object:
    if not isinstance(choice, dict) or not isinstance(choice.get("delta"), dict):
        return choice
    message = {"role": "assistant", "content": None} | choice["delta"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} if isinstance(call, dict) else call
            for call in calls
        ]
    return {("message" if name == "delta" else name): (message if name == "delta" else choice[name]) for name in choice}


def _merged(whole: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    for name, value in piece.items():
        before = whole.get(name)
        if before is None or name == "usage":
            if value is not None or name not in whole:
                whole[name] = _listed([], value) if isinstance(value, list) else value
        elif isinstance(before, dict) and isinstance(value, dict):
            whole[name] = _merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            whole[name] = _listed(before, value)
        elif isinstance(before, str) and isinstance(value, str) and name not in _TOLD_ONCE:
            whole[name] = before + value
        elif value is not None and name not in _TOLD_ONCE:
            whole[name] = value
    return whole


def _listed(whole: list[Any], pieces: list[Any]) -> list[Any]:
    """Pieces of choices and of tool calls have an index; those of other lists come one after another."""
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        before = None if index is None else next((each for each in whole if _index(each) == index), None)
        if before is None:
            whole.append(_merged({}, piece) if isinstance(piece, dict) else piece)
        else:
            _merged(before, piece)
    return whole


def _index(each: object) -> object:
    return each.get("index") if isinstance(each, dict) else None
