from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.backends.tool_call_indexes import ToolCallIndexes


def chunk(*calls: Any, choice: Any = 0) -> bytes:
    return json.dumps({"choices": [{"delta": {"tool_calls": list(calls)}, "index": choice}], "n": 1.0}).encode()


def indexes(data: bytes) -> list[int]:
    return [call["index"] for call in json.loads(data)["choices"][0]["delta"]["tool_calls"]]


def test_a_call_without_an_index_gets_the_next_and_what_goes_on_gets_its_own() -> None:
    of = ToolCallIndexes()
    assert indexes(of.completed(chunk({"id": "a", "function": {"name": "f"}}))) == [0]
    assert indexes(of.completed(chunk({"function": {"arguments": "{"}, "index": None}))) == [0]
    assert indexes(of.completed(chunk({"id": "b"}, {"id": "c"}))) == [1, 2]
    assert indexes(of.completed(chunk({"id": "d"}, choice=1))) == [0]
    assert indexes(of.completed(chunk({"function": {}}, choice=None))) == [2]
    assert of.completed(chunk({"id": "e"})) == chunk({"index": 3, "id": "e"}).replace(b": ", b":").replace(b", ", b",")


@pytest.mark.parametrize(
    "data",
    [
        chunk({"index": 4, "id": "a"}),
        chunk(),
        chunk(7),
        b'{"choices": [{"delta": {"tool_calls": null}}]}',
        b'{"choices": {"tool_calls": [{}]}}',
        b'{"choices": [{"delta": {"content": "tool_calls"}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": "0"}]}}]}',
        b'{"tool_calls"' + b"[" * 10_000,
        b'"tool_calls"',
    ],
)
def test_all_else_stays_as_it_is(data: bytes) -> None:
    assert ToolCallIndexes().completed(data) == data


def test_a_call_behind_one_that_has_an_index_comes_next() -> None:
    of = ToolCallIndexes()
    of.completed(chunk({"index": 4, "id": "a"}))
    assert indexes(of.completed(chunk({"id": "b"}))) == [5]
