from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.renaming import Renaming, renamed

NAMES = st.sampled_from(["m", "theirs", "model", 'a"b', "wörld", "back\\slash", ""])
LEAVES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=6) | NAMES
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["model", "a", "{", '"model"', "models"]) | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["model", "id", "choices", "delta", "modél"]), VALUES, max_size=5)


@given(OBJECTS, NAMES, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
def test_it_is_as_if_decoded_set_and_compared(
    value: dict[str, Any], name: str, ascii_only: bool, separators: tuple[str, str]
) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    found = renamed(data, name)
    expected = value | {"model": name} if "model" in value else value
    assert json.loads(found) == expected
    assert list(json.loads(found)) == list(value)


@given(st.lists(OBJECTS, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=8), NAMES, st.booleans())
def test_the_events_of_a_stream_are_renamed_each_as_it_would_be_alone(
    values: list[dict[str, Any]], order: list[int], name: str, alike: bool
) -> None:
    head = {"id": "c", "model": "theirs"} if alike else {}
    events = [json.dumps(head | {"choices": 1} | value, separators=(",", ":")).encode() for value in values]
    renaming = Renaming(name)
    for at in order:
        data = events[at % len(events)]
        assert renaming.renamed(data) == renamed(data, name)


@given(st.text(), NAMES)
def test_what_is_no_object_stays(text: str, name: str) -> None:
    data = text.encode(errors="replace")
    assert renamed(data, name) == data or text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "template",
    [
        b'{"id":"c","model":%b,"choices":[{"delta":{"content":"a"}}],"n":1.50}',
        b'{ "model" : %b , "x" : 1e2, "big": 123456789012345678901234567890 }',
        b'{"choices":[{"index":0,"delta":{"content":"?"}}],"created":1,"model":%b,"timings":{"ms":180.0250}}',
        b'{"choices":[ {"text":"\\ud83d\\ude00"} ],"model": %b}',
        b'{"model":%b,"bytes":"\xff"}',
    ],
)
def test_all_other_bytes_stay(template: bytes) -> None:
    assert renamed(template % b'"their/model"', "m") == template % b'"m"'
    assert renamed(template % b'"m"', "m") == template % b'"m"'


def test_other_values_stay_where_the_name_stands_more_than_once() -> None:
    data = b'{"choices":[{"token":"model","logprob":-1.50}],"model":"theirs","n":1e2}'
    assert renamed(data, "m") == b'{"choices":[{"token":"model","logprob":-1.50}],"model":"m","n":1e2}'


def test_a_name_that_is_nested_only_is_not_the_answers() -> None:
    for data in (b'{"a":{"model":"x"}}', b'{"a":["model","x"]}', b'{"content":"model"}', b'[{"model":"x"}]'):
        assert renamed(data, "m") == data


def test_a_name_that_is_none_is_set() -> None:
    assert renamed(b'{"model":null}', "m") == b'{"model":"m"}'
    assert renamed(b'{"model":{"name":"x"}}', "m") == b'{"model":"m"}'


def test_what_is_nested_without_end_stays() -> None:
    data = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"x"}'
    assert renamed(data, "m") == data


def test_half_a_surrogate_pair_does_not_keep_their_name() -> None:
    data = b'{"choices":[{"text":"\\ud83d"}],"model":"theirs"}'
    assert renamed(data, "m") == b'{"choices":[{"text":"\\ud83d"}],"model":"m"}'
