"""Where a request says what its user wants: the last turn's text, and all of the user's texts.

Both read a body whose JSON is decoded. What is not as its API has it counts as having no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.apis import Api

_TURNS: Final[dict[Api, str]] = {"chat_completions": "messages", "messages": "messages", "responses": "input"}
_TEXTS: Final[dict[Api, str]] = {"chat_completions": "text", "messages": "text", "responses": "input_text"}
"""What a part that is text is called."""
TAKEN_OUT: Final = True
"""Stands where the text was. No request with a text there has it."""


def without_last_text(api: Api, fields: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The body without the last user turn's text, and that text. None: its last turn is not the user's, or not text
    alone."""
    if (field := _TURNS.get(api)) is None:
        return None
    turns = fields.get(field)
    if api == "responses" and isinstance(turns, str):
        return {**fields, field: TAKEN_OUT}, turns
    if not isinstance(turns, list) or not turns or not _of_user(turns[-1]):
        return None
    last = turns[-1]
    content = last.get("content")
    if isinstance(content, str):
        return {**fields, field: [*turns[:-1], {**last, "content": TAKEN_OUT}]}, content
    if not isinstance(content, list) or not content:
        return None
    texts = [_text_of(part, _TEXTS[api]) for part in content]
    read = [text for text in texts if text is not None]
    if len(read) < len(texts):
        return None
    emptied = [{**part, "text": TAKEN_OUT} for part in content]
    return {**fields, field: [*turns[:-1], {**last, "content": emptied}]}, "\n".join(read)


def user_texts(api: Api, fields: dict[str, Any]) -> list[str] | None:
    """What the user says in all turns. None: there is something that cannot be read, such as token ids."""
    if api == "completions":
        prompt = fields.get("prompt")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        texts = [text for text in prompts if isinstance(text, str)]
        return texts if len(texts) == len(prompts) else None
    turns = fields.get(_TURNS.get(api, ""))
    if isinstance(turns, str):
        return [turns]
    if not isinstance(turns, list):
        return []
    return [text for turn in turns if _of_user(turn) for text in _texts(turn.get("content"), _TEXTS[api])]


def _of_user(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user" and turn.get("type", "message") == "message"


def _texts(content: Any, kind: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if (text := _text_of(part, kind)) is not None:
                yield text


def _text_of(part: Any, kind: str) -> str | None:
    if isinstance(part, dict) and part.get("type") == kind and isinstance(text := part.get("text"), str):
        return text
    return None
