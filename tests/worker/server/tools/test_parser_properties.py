"""Whatever text comes, however it is cut: nothing raises, nothing is lost, and the pieces add up to the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.server.tools.reading import NAMES, calls_of, joined, pieces_of, text_of
from tests.worker.server.tools.test_parsers import FORMS, family, spelled

FORMATS = ["hermes", "llama3", "mistral"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    json.dumps,
    st.dictionaries(TEXT, JSON, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ":",
        ";",
        " ",
        "\n",
        '"name"',
        '"arguments"',
        '"parameters"',
        '"f"',
        "f",
        '{"name": "f", "arguments": {"a": ',
        '{"name": "f", "parameters": {}}',
        '[{"name": "get_time", "arguments": {}}]',
        '"\\u00e9\\"',
        "true",
        "1.5e3",
        "\ud800",
    ]
)
MESS = st.lists(FRAGMENTS | TEXT, max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=12)


def cuts_within(text: str, cuts: list[int]) -> list[int]:
    return [cut for cut in cuts if cut <= len(text)]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=MESS, cuts=CUTS)
def test_any_mess_is_read_the_same_however_it_is_cut(form: str, text: str, cuts: list[int]) -> None:
    whole = joined(pieces_of(form, text))
    assert joined(pieces_of(form, text, cuts_within(text, cuts))) == whole
    assert joined(pieces_of(form, text, range(len(text)))) == whole


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=MESS)
def test_nothing_is_made_up_or_lost(form: str, text: str) -> None:
    pieces = pieces_of(form, text)
    calls = calls_of(pieces)
    assert all(name in NAMES for name, _ in calls)
    if not calls:
        assert text_of(pieces) == text
    # Each character that comes out stands in the text, in the same order; but for decoded and absent arguments.
    rest = iter(text)
    for piece in pieces:
        content = getattr(piece, "text", "")
        if content != "{}" and '\\"' not in text:
            assert all(character in rest for character in content)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, before=TEXT, after=TEXT, cuts=CUTS)
def test_sound_calls_are_found_with_their_arguments_untouched(
    form: str, calls: list[tuple[str, str]], before: str, after: str, cuts: list[int]
) -> None:
    # Braces and brackets would be text of Llama's and Mistral's own kind.
    before, after = (text.translate({ord(mark): None for mark in "{}[];"}) for text in (before, after))
    text = f"{before}{spelled(form, calls)}{after}"
    pieces = pieces_of(family(form), text, cuts_within(text, cuts))
    assert calls_of(pieces) == calls
    outside: Any = (before if before.strip(" \t\r\n") else "") + (after if after.strip(" \t\r\n") else "")
    assert text_of(pieces) == outside
