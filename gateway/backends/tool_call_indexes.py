"""The index that each tool call of a stream's chunk bears: by it clients put a call's pieces together.

Some servers leave it out, as Google's does, and OpenAI's own SDK then raises TypeError.
Reference: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.backends.lenient_json import decoded, encoded


class ToolCallIndexes:
    """Of one stream's calls."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """By choice, how many indexes are taken."""

    def completed(self, data: bytes) -> bytes:
        """A chunk with an index for each call that has none; as it is where there is none to add."""
        if b'"tool_calls"' not in data:
            return data
        try:
            choices = _decoder.decode(data).choices
        except (msgspec.DecodeError, RecursionError):
            return data
        added: dict[tuple[int, int], int] = {}
        for place, choice in enumerate(choices):
            for at, call in enumerate(choice.delta.tool_calls or ()):
                index = self._index_of(choice.index or 0, call)
                if call.index is None:
                    added[place, at] = index
        return _with_indexes(data, added) if added else data

    def _index_of(self, choice: int, call: _Call) -> int:
        known = self._known.get(choice, 0)
        index = call.index
        if index is None:
            # A new call bears an id, what goes on does not.
            index = known if call.id or not known else known - 1
        self._known[choice] = max(known, index + 1)
        return index


class _Call(msgspec.Struct):
    index: int | None = None
    id: Any = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    index: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Chunk)


def _with_indexes(data: bytes, added: dict[tuple[int, int], int]) -> bytes:
    chunk = decoded(data)
    for (place, at), index in added.items():
        calls = chunk["choices"][place]["delta"]["tool_calls"]
        calls[at] = {"index": index} | calls[at] | {"index": index}
    return encoded(chunk)
