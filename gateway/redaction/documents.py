"""JSON with its texts blacked out; it stays JSON of the same form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.redaction import media, payment, secrets

_TOKEN_BY_TOKEN: Final = frozenset(("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"))
"""Fields that tell a text once more, in pieces in which nothing can be found: they are left out."""
_BEGINS: Final = frozenset("{[ \n")
_ENDS: Final = frozenset("}]")
MOST_NESTED: Final = 4
"""How deep JSON within a text of JSON, as a tool call's arguments, is read as such."""


def redact_json(body: bytes, text: Callable[[str], str], counts: Counter[str]) -> bytes:
    """What is no JSON is taken for text. ``text`` blacks a text out, ``counts`` are of what is found beside that."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = _nearly(body)
        if value is None:
            return text(body.decode(errors="replace")).encode(errors="replace")
    try:
        return _encoded(_Walk(text, counts).value(value, 0))
    except RecursionError:
        return text(body.decode(errors="replace")).encode(errors="replace")


class _Walk:
    def __init__(self, text: Callable[[str], str], counts: Counter[str]) -> None:
        self._text = text
        self._counts = counts

    def value(self, value: Any, nested: int) -> Any:
        kind = type(value)
        if kind is str:
            return self.text(value, nested)
        if kind is dict:
            return {name: self._field(name, each, nested) for name, each in value.items()}
        if kind is list:
            return [self.value(each, nested) for each in value]
        if kind is int and value > 10**12 and payment.is_card(str(value)):
            self._counts[payment.CARD] += 1
            return f"[{payment.CARD}]"
        return value

    def text(self, text: str, nested: int) -> str:
        if (data := media.as_data(text)) is not None:
            self._counts[media.DATA] += 1
            return data
        if nested < MOST_NESTED and text[:1] in _BEGINS and text.rstrip()[-1:] in _ENDS:
            inner = _inner(text)
            if inner is not None:
                changed = self.value(inner, nested + 1)
                return text if changed == inner else _encoded(changed).decode()
        return self._text(text)

    def _field(self, name: str, value: Any, nested: int) -> Any:
        if type(value) is str and secrets.is_name_of_secret(name, value):
            self._counts[secrets.SECRET] += 1
            return f"[{secrets.SECRET}]"
        if name in _TOKEN_BY_TOKEN and type(value) in (list, dict):
            return None
        return self.value(value, nested)


def _inner(text: str) -> Any:
    """The object or list that the text is; None: it is neither."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict | list) else None


def _nearly(body: bytes) -> Any:
    """What Python's own encoder writes beyond the standard: NaN, and half a surrogate pair."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":")).encode()
