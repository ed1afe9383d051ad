"""The framer gives the same events however the bytes are cut, and reads what the standard says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.sse import Comment, Event, EventTooLarge, Framer, encode_comment, encode_event

RECORDED = (
    b"\xef\xbb\xbf: hello\r\n"
    b'data: {"text":"na\xc3\xafve \xe2\x9c\x93 \xf0\x9f\x8c\x8a"}\r\n\r\n'
    b"event: error\rdata: one\rdata:two\rid: 7\r\r"
    b"data\n\n"
    b":\n"
    b"retry: 10\nunknown: x\n"
    b"data:  leading space kept\n\n"
    b"\n\n"
    b"data: last, without a blank line"
)
EXPECTED = [
    Comment(b"hello"),
    Event('{"text":"naïve ✓ 🌊"}'.encode()),
    Event(b"one\ntwo", b"error", b"7"),
    Event(b"", b"", b"7"),
    Comment(b""),
    Event(b" leading space kept", b"", b"7"),
    Event(b"last, without a blank line", b"", b"7"),
]


def frame(chunks: list[bytes], *, limit: int = 1_000_000) -> list[Event | Comment]:
    framer = Framer(limit=limit)
    out: list[Event | Comment] = []
    for chunk in chunks:
        out += framer.feed(chunk)
    return out + framer.flush()


def test_reads_line_endings_comments_and_several_data_lines() -> None:
    assert frame([RECORDED]) == EXPECTED


@pytest.mark.parametrize("cut", range(len(RECORDED) + 1))
def test_every_cut_in_two_gives_the_same_events(cut: int) -> None:
    assert frame([RECORDED[:cut], RECORDED[cut:]]) == EXPECTED


def test_byte_by_byte_gives_the_same_events() -> None:
    assert frame([bytes([byte]) for byte in RECORDED]) == EXPECTED


@given(st.lists(st.integers(0, len(RECORDED)), max_size=12))
def test_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(RECORDED)]
    assert frame([RECORDED[a:b] for a, b in pairwise(edges)]) == EXPECTED


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\r")), max_size=5), st.data())
def test_what_is_encoded_is_framed_back(texts: list[str], data: st.DataObject) -> None:
    wire = b"".join(encode_event(text.encode("utf-8", "replace")) + encode_comment(b"tick") for text in texts)
    cut = data.draw(st.integers(0, len(wire)))
    events = [item for item in frame([wire[:cut], wire[cut:]]) if isinstance(item, Event)]
    assert [event.data for event in events] == [text.encode("utf-8", "replace") for text in texts]


@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_is_framed_the_same_whole_and_cut(garbage: bytes, cut: int) -> None:
    assert frame([garbage[:cut], garbage[cut:]]) == frame([garbage])


def test_an_endless_line_is_refused_in_bounded_memory() -> None:
    with pytest.raises(EventTooLarge):
        frame([b"x" * 100] * 20, limit=1000)


def test_an_endless_event_is_refused_in_bounded_memory() -> None:
    with pytest.raises(EventTooLarge):
        frame([b"data: 0123456789\n"] * 200, limit=1000)


def test_a_long_line_in_small_chunks_is_held_once() -> None:
    framer = Framer()
    for _ in range(4000):
        framer.feed(b"x" * 16)
    (event,) = [*framer.feed(b"\ndata: y\n\n"), *framer.flush()]
    assert isinstance(event, Event)
    assert event.data == b"y"


def test_lines_named_error_are_events_for_who_asks_for_them() -> None:
    wire = b'data: {}\n\nerror: {"code":500}\n\nerror:\n\n'
    assert Framer().feed(wire) == [Event(b"{}")]
    assert Framer(error_field=True).feed(wire) == [Event(b"{}"), Event(b'{"code":500}', b"error"), Event(b"", b"error")]
