"""What is to be known of a whole answer before it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gateway.apis import Api
from gateway.backends.lenient_json import decoded

_COMPLETE: Final = frozenset(
    ("stop", "tool_calls", "function_call", "end_turn", "stop_sequence", "tool_use", "completed")
)
"""Reasons of an answer that came to its own end, in all APIs."""
_TRUNCATED: Final = frozenset(("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"))
_FILTERED: Final = frozenset(("content_filter", "refusal"))
_CALLS: Final = ("_call", "tool_use")
"""Ends of the types of items and blocks that call something."""


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True):
    finish_reasons: tuple[str | None, ...] = ()
    """Of each choice, in the API's words; None: it does not say. Of a response its status, or why it is incomplete."""
    complete: bool = False
    """Whether it came to its own end, in all choices: not cut, not filtered, not failed."""
    truncated: bool = False
    """Whether the output cap or the context's end cut it."""
    refused: bool = False
    """Whether the model refused, or a filter took something away."""
    has_tool_calls: bool = False
    text: str = ""
    """Of all choices, parts and blocks, a line end between them; refusals and thoughts are left out."""


def describe(api: Api, body: bytes) -> AnswerFacts:
    """Of no answer at all, also of bytes that are no JSON, nothing is said but that it is not complete."""
    answer = decoded(body)
    if not isinstance(answer, dict):
        return AnswerFacts()
    if api == "messages":
        return _of_message(answer)
    if api == "responses":
        return _of_response(answer)
    if api == "embeddings":
        embedded = isinstance(answer.get("data"), list)
        return AnswerFacts(finish_reasons=("stop",) if embedded else (), complete=embedded)
    return _of_completion(answer)


def _of_completion(answer: dict[str, Any]) -> AnswerFacts:
    reasons: list[str | None] = []
    texts: list[str] = []
    calls = refused = False
    for choice in _objects(answer.get("choices")):
        reasons.append(_text_or_none(choice.get("finish_reason")))
        message = choice.get("message")
        said = message if isinstance(message, dict) else {}
        texts += _texts(choice.get("text"))
        texts += _texts(said.get("content"))
        refused = refused or bool(said.get("refusal"))
        calls = calls or bool(said.get("tool_calls") or said.get("function_call"))
    return _facts(reasons, texts, calls=calls, refused=refused)


def _of_message(answer: dict[str, Any]) -> AnswerFacts:
    blocks = list(_objects(answer.get("content")))
    texts = [text for block in blocks if block.get("type") == "text" for text in _texts(block.get("text"))]
    return _facts([_text_or_none(answer.get("stop_reason"))], texts, calls=any(map(_calls, blocks)), refused=False)


def _of_response(answer: dict[str, Any]) -> AnswerFacts:
    reason = _text_or_none(answer.get("status"))
    details = answer.get("incomplete_details")
    if reason == "incomplete" and isinstance(details, dict):
        reason = _text_or_none(details.get("reason")) or reason
    items = list(_objects(answer.get("output")))
    parts = [part for item in items if item.get("type") == "message" for part in _objects(item.get("content"))]
    texts = [text for part in parts for text in _texts(part.get("text"))]
    refused = any(part.get("type") == "refusal" for part in parts)
    return _facts([reason], texts, calls=any(map(_calls, items)), refused=refused)


def _facts(reasons: list[str | None], texts: list[str], *, calls: bool, refused: bool) -> AnswerFacts:
    return AnswerFacts(
        finish_reasons=tuple(reasons),
        complete=bool(reasons) and all(reason in _COMPLETE for reason in reasons),
        truncated=any(reason in _TRUNCATED for reason in reasons),
        refused=refused or any(reason in _FILTERED for reason in reasons),
        has_tool_calls=calls,
        text="\n".join(texts),
    )


def _calls(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return isinstance(kind, str) and kind.endswith(_CALLS)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())


def _texts(content: Any) -> list[str]:
    """Of a content that is text, or a list of parts."""
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in _objects(content) if isinstance(part.get("text"), str) and part["text"]]


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
