"""JSON with its texts blacked out; it stays JSON of the same form, and what was cut stays the head of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.redaction import media, payment, secrets

_TOKEN_BY_TOKEN: Final = frozenset(("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"))
"""Fields that tell a text once more, in pieces in which nothing can be found: they are left out."""
_BEGINS: Final = frozenset("{[ \n")
_ENDS: Final = frozenset("}]")
_LITERAL = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A text as JSON writes it; the last one may be cut."""
_ENDED = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_LONG_NUMBER = re.compile(r"(?<![\w.+-])[0-9]{13,19}(?![\w.])", re.ASCII)
_NAMES = re.compile(r"\s*:")
MOST_NESTED: Final = 4
"""How deep JSON within a text of JSON, as a tool call's arguments, is read as such."""


def redact_json(body: bytes, text: Callable[[str], str], counts: Counter[str]) -> bytes:
    """What is nothing like JSON is taken for text. ``text`` blacks out, ``counts`` are of what is found beside that."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = _nearly(body)
        if value is None:
            return _Walk(text, counts).broken(body)
    try:
        return _encoded(_Walk(text, counts).value(value, 0))
    except RecursionError:
        return _Walk(text, counts).broken(body)


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

    def broken(self, body: bytes) -> bytes:
        """What is no JSON, mostly because it was cut: its texts, and what stands between them."""
        whole = body.decode(errors="replace")
        if whole.lstrip()[:1] not in ("{", "["):
            return self._text(whole).encode(errors="replace")
        out: list[str] = []
        at, name = 0, ""
        for match in _LITERAL.finditer(whole):
            start, end = match.span()
            between = whole[at:start]
            out.append(self._between(between))
            literal, at = match[0], end
            if _NAMES.match(whole, end):
                out.append(literal)
                name = literal[1:-1]
                continue
            out.append(self._literal(name if between.strip() == ":" else "", literal))
        out.append(self._between(whole[at:]))
        return "".join(out).encode(errors="replace")

    def _between(self, text: str) -> str:
        """A number that is a card becomes a text, as elsewhere."""
        return self._text(_LONG_NUMBER.sub(lambda found: str(_encoded(self.value(int(found[0]), 0)), "ascii"), text))

    def _literal(self, name: str, literal: str) -> str:
        ended = _ENDED.fullmatch(literal) is not None
        content = literal[1:-1] if ended else _HALF_ESCAPE.sub("", literal[1:])
        try:
            said = json.loads(f'"{content}"', strict=False)
        except ValueError:
            return self._text(literal)
        changed = self._field(name, said, 0)
        if changed == said:
            return literal
        written = json.dumps(changed, ensure_ascii=False)
        return written if ended else written[:-1]

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
