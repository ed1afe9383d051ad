"""Tool calls as clients know what to do with them.

Each has an id, by which its result is sent back. In a stream it has an index, too, from 0 on in the order of coming,
and its id and name are told once: OpenAI's own SDK puts pieces together by index, and adds text to text. Some servers
do otherwise, and the SDK then raises TypeError, or makes one call of two: Google's leave the index out, others have 0
for all, older versions of vLLM send a new id with each piece, others send none.
Reference: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.backends.lenient_json import decoded, encoded
from gateway.ids import uuid7


class StreamedCalls:
    """Of one stream."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def corrected(self, data: bytes) -> bytes:
        """A chunk with its calls as they should be; as it is where they are."""
        if b'"tool_calls"' not in data:
            return data
        try:
            choices = _decoder.decode(data).choices
        except (msgspec.DecodeError, RecursionError):
            return data
        changes: list[tuple[int, int, dict[str, Any]]] = []
        for place, said in enumerate(choices):
            if said.delta is None or not said.delta.tool_calls:
                continue
            choice = self._choices.setdefault(said.index or 0, _Choice())
            for at, piece in enumerate(said.delta.tool_calls):
                change = choice.change(piece)
                if change:
                    changes.append((place, at, change))
        return _changed(data, changes) if changes else data


class _Choice:
    """The calls of one choice."""

    def __init__(self) -> None:
        self._calls: list[_Known] = []
        self._places: dict[int, int] = {}
        """By the index that the server gives."""

    def change(self, piece: _Piece) -> dict[str, Any]:
        """What is to be put into the piece; None: to be left out."""
        id, name = _text(piece.id), _text(piece.function.name if piece.function is not None else None)
        place = self._place_of(piece.index, id, name)
        change: dict[str, Any] = {}
        if place is None:
            place = len(self._calls)
            self._calls.append(_Known(id, name))
            if piece.index is not None:
                self._places[piece.index] = place
            if id is None:
                change["id"] = _new_id()
        else:
            call = self._calls[place]
            if id is not None:
                change["id"] = None
            if name is not None and name == call.name:
                change["name"] = None
            call.name = call.name or name
        if piece.index != place:
            change["index"] = place
        return change

    def _place_of(self, index: int | None, id: str | None, name: str | None) -> int | None:
        """Of the call that the piece goes on with; None: it begins another one."""
        place = len(self._calls) - 1 if index is None else self._places.get(index, -1)
        if place < 0:
            return None
        call = self._calls[place]
        if id is None:
            begins = name is not None and call.id is None and call.name is not None
        elif index is None:
            begins = id != call.id
        else:
            begins = name is not None and id != call.id
        return None if begins else place


def identified(answer: bytes) -> bytes:
    """A whole chat completion with an id for each call that has none; as it is where all have one."""
    if b'"tool_calls"' not in answer:
        return answer
    try:
        choices = _whole_decoder.decode(answer).choices
    except (msgspec.DecodeError, RecursionError):
        return answer
    said = [choice.message.tool_calls or () if choice.message is not None else () for choice in choices]
    changes = [
        (place, at, {"id": _new_id()})
        for place, calls in enumerate(said)
        for at, call in enumerate(calls)
        if _text(call.id) is None
    ]
    return _changed(answer, changes, within="message") if changes else answer


def _new_id() -> str:
    return f"call_{uuid7().hex}"


class _Known(msgspec.Struct):
    id: str | None
    """As the server told it."""
    name: str | None


class _Function(msgspec.Struct):
    name: Any = None


class _Piece(msgspec.Struct):
    index: int | None = None
    id: Any = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Piece] | None = None


class _Said(msgspec.Struct):
    delta: _Delta | None = None
    index: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Said]


class _SaidWhole(msgspec.Struct):
    message: _Delta | None = None


class _Whole(msgspec.Struct):
    choices: list[_SaidWhole]


_decoder = msgspec.json.Decoder(_Chunk)
_whole_decoder = msgspec.json.Decoder(_Whole)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _changed(data: bytes, changes: list[tuple[int, int, dict[str, Any]]], *, within: str = "delta") -> bytes:
    answer = decoded(data)
    for place, at, change in changes:
        calls = answer["choices"][place][within]["tool_calls"]
        call = {field: None for field in ("index", "id") if field in change} | calls[at]
        for field, value in change.items():
            where = call["function"] if field == "name" else call
            if value is None:
                del where[field]
            else:
                where[field] = value
        calls[at] = call
    return encoded(answer)
