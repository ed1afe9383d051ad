"""A stream is blacked out as the whole is, wherever it is cut."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.redaction import MOST_OF_MATCH, Redactor, StreamRedactor, redactor
from tests.gateway.redaction.cases import ALONE, IN_TEXT, WHOLE

ONES = [text for texts in WHOLE.values() for text in texts]
PIECES = st.sampled_from(
    [*ONES, *ALONE, *(text for text, _ in IN_TEXT), " ", "\n", "x", "é", "7", "😀 ", "-", "\ud83d"]
)
CUTS = st.lists(st.integers(0, 10**6), max_size=8)


class OfTheirs(msgspec.Struct):
    name: str
    regex: str


OWN = [OfTheirs("employee", r"\bEMP-\d{5}\b"), OfTheirs("project", r"(?i)project\s+(?:falcon|müller)")]


def streamed(text: str, cuts: list[int], patterns: list[OfTheirs]) -> str:
    stream = StreamRedactor(Redactor(patterns))
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    out = [stream.feed(text[begin:end]) for begin, end in pairwise(places)]
    return "".join(out) + stream.end()


@pytest.mark.parametrize("text", [*ONES, *(text for text, _ in IN_TEXT), "EMP-12345", "see Project  Müller."])
def test_every_cut_of_every_kind(text: str) -> None:
    whole = f"So it was: {text}\nand more."
    expected = Redactor(OWN).text(whole)
    assert expected != whole
    for cut in range(len(whole) + 1):
        assert streamed(whole, [cut], OWN) == expected


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so narrow that texts of a test lie across many."""
    monkeypatch.setattr(redactor, "WINDOW", 400)
    monkeypatch.setattr(redactor, "OVERLAP", 130)
    monkeypatch.setattr(redactor, "CONTEXT", 64)


@pytest.mark.usefixtures("narrow")
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, max_size=30), cuts=CUTS)
def test_any_cuts_of_any_text_across_windows(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert streamed(text, cuts, OWN) == Redactor(OWN).text(text)
    assert streamed(text, list(range(len(text))), []) == Redactor().text(text)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("text", [text for text in ONES if len(text) <= 130])
def test_a_window_s_edge_hides_nothing(text: str) -> None:
    placeholder = Redactor().text(text)
    for before in range(130, 410, 3):
        whole = "word " * (before // 5) + " " * (before % 5) + text + " word" * 100
        assert streamed(whole, [before + 5], []) == whole.replace(text, placeholder)


@pytest.mark.parametrize(
    "before", [0, redactor.WINDOW - redactor.OVERLAP - 1, redactor.WINDOW - redactor.OVERLAP, redactor.WINDOW]
)
def test_matches_as_long_as_is_promised(before: int) -> None:
    text = "." * before + "<" + "y" * (MOST_OF_MATCH - 2) + ">" + "." * 70_000
    own = [OfTheirs("angle", "<y+>")]
    expected = "." * before + "[ANGLE]" + "." * 70_000
    assert Redactor(own).text(text) == expected
    assert streamed(text, [before + 9, 66_000], own) == expected


@pytest.mark.parametrize("head", ["data:image/png;base64,", "ghp_", "password='"])
def test_what_is_longer_than_any_window_is_gone_to_its_end(head: str) -> None:
    text = "See " + head + "aB3d" * 60_000 + "\nand that was it"
    found = streamed(text, [100_000], [])
    assert found == Redactor().text(text)
    assert found.endswith("\nand that was it")
    assert len(found) < 60


def test_a_stream_holds_no_more_than_a_window() -> None:
    stream = StreamRedactor(Redactor())
    given_, told = 0, 0
    for _ in range(100):
        told += len(stream.feed("nothing to see " * 1000))
        given_ += 15_000
        assert given_ - told <= redactor.WINDOW
    assert told + len(stream.end()) == given_
