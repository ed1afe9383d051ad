"""By hand here; with the SDKs in ``tests/e2e/conformance/test_hostile_calls.py``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.tool_calls import StreamedCalls, identified


def chunk(*calls: Any, choice: Any = 0) -> bytes:
    return json.dumps({"choices": [{"delta": {"tool_calls": list(calls)}, "index": choice}], "n": 1.0}).encode()


def calls_of(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(data)["choices"][0]["delta"]["tool_calls"]
    return found


def named(name: str = "f", **more: Any) -> dict[str, Any]:
    return more | {"function": {"name": name, "arguments": ""}}


def indexes(data: bytes) -> list[int]:
    return [call["index"] for call in calls_of(data)]


def test_a_call_without_an_index_gets_the_next_and_what_goes_on_gets_its_own() -> None:
    of = StreamedCalls()
    assert indexes(of.corrected(chunk(named(id="a")))) == [0]
    assert indexes(of.corrected(chunk({"function": {"arguments": "{"}, "index": None}))) == [0]
    assert indexes(of.corrected(chunk(named(id="b"), named(id="c")))) == [1, 2]
    assert indexes(of.corrected(chunk(named(id="d"), choice=1))) == [0]
    assert indexes(of.corrected(chunk({"function": {}}, choice=None))) == [2]
    whole = json.loads(of.corrected(chunk(named(id="e"))))
    assert whole == {"choices": [{"delta": {"tool_calls": [named(id="e", index=3)]}, "index": 0}], "n": 1.0}


def test_another_id_and_a_name_begin_another_call_under_the_same_index() -> None:
    of = StreamedCalls()
    assert indexes(of.corrected(chunk(named(index=0, id="a"), named(index=0, id="b")))) == [0, 1]
    assert indexes(of.corrected(chunk({"index": 0, "function": {"arguments": "{}"}}))) == [1]
    assert indexes(of.corrected(chunk(named(index=7, id="c")))) == [2]


def test_an_id_and_a_name_are_told_once_and_an_id_in_any_case() -> None:
    of = StreamedCalls()
    first = chunk(named(index=0, id="a"))
    assert of.corrected(first) == first
    for id in ("a", "x"):
        (piece,) = calls_of(of.corrected(chunk({"index": 0, "id": id, "function": {"arguments": "{"}})))
        assert piece == {"index": 0, "function": {"arguments": "{"}}
    (piece,) = calls_of(of.corrected(chunk(named(index=0, id="a"))))
    assert piece == {"index": 0, "function": {"arguments": ""}}
    made = [
        calls_of(of.corrected(chunk(named(index=index, id=id))))[0]["id"]
        for index, id in ((1, ""), (2, None), (2, None))
    ]
    assert len(set(made)) == 3
    assert all(id.startswith("call_") for id in made)


@pytest.mark.parametrize(
    "data",
    [
        chunk(named(index=0, id="a"), named(index=1, id="b"), {"index": 0, "function": {"arguments": "{}"}}),
        chunk(named(index=0, id="a"), {"index": 0, "id": None, "function": {"name": None, "arguments": "{}"}}),
        chunk(named(index=0, id="a"), {"index": 0, "id": "", "function": {"name": "", "arguments": "{}"}}),
        chunk(),
        chunk(7),
        b'{"choices": [{"delta": {"tool_calls": null}}]}',
        b'{"choices": [{"delta": null, "x": "tool_calls"}, {"y": {"tool_calls": [{}]}}]}',
        b'{"choices": {"tool_calls": [{}]}}',
        b'{"choices": [{"delta": {"content": "tool_calls"}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": "0"}]}}]}',
        b'{"tool_calls"' + b"[" * 10_000,
        b'"tool_calls"',
    ],
)
def test_all_else_stays_as_it_is(data: bytes) -> None:
    assert StreamedCalls().corrected(data) == data


def whole(*calls: Any) -> bytes:
    return json.dumps({"id": 1.0, "choices": [{"message": {"tool_calls": list(calls)}}, {"message": None}]}).encode()


def test_calls_of_a_whole_answer_have_ids() -> None:
    found = json.loads(identified(whole(named(id=""), named(id="b"), named(), named(id=None))))
    calls = found["choices"][0]["message"]["tool_calls"]
    ids = [call["id"] for call in calls]
    assert ids[1] == "b"
    assert len(set(ids)) == 4
    assert all(ids)
    assert all(call | {"id": 0} == named(id=0) for call in calls)
    assert (found["id"], found["choices"][1]) == (1.0, {"message": None})


@pytest.mark.parametrize(
    "answer",
    [whole(named(id="a")), whole(), whole(3), b'{"tool_calls": 1}', b'"tool_calls"', b'{"tool_calls"' + b"[" * 10_000],
)
def test_all_other_answers_stay_as_they_are(answer: bytes) -> None:
    assert identified(answer) == answer


_piece = st.fixed_dictionaries(
    {},
    optional={
        "index": st.none() | st.integers(-2, 2),
        "id": st.none() | st.sampled_from(["", "a", "b"]) | st.integers(),
        "function": st.none()
        | st.fixed_dictionaries({}, optional={"name": st.none() | st.sampled_from(["", "f", "g"])}),
    },
)


@given(st.lists(st.lists(_piece, max_size=3), max_size=4))
def test_whatever_comes_the_calls_are_in_order_and_have_one_id_each(chunks: list[list[dict[str, Any]]]) -> None:
    of, ids = StreamedCalls(), {}
    for pieces in chunks:
        for piece in calls_of(of.corrected(chunk(*pieces))):
            index = piece["index"]
            assert 0 <= index <= len(ids)
            if index == len(ids):
                ids[index] = piece["id"]
                assert ids[index]
            else:
                assert not isinstance(piece.get("id"), str) or not piece["id"]
