import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.engine.output import TextStream


class ByteTokens:
    """A byte-level vocabulary: ids below 256 are single bytes, those from 300 on are pieces, 256 is special."""

    SPECIAL = 256

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self._pieces = list(pieces)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._one(i) for i in ids)

    def _one(self, token_id: int) -> bytes:
        if token_id == self.SPECIAL:
            return b""
        return bytes([token_id]) if token_id < 256 else self._pieces[token_id - 300]


def stream_of(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[TextStream, list[int]]:
    return TextStream(ByteTokens(pieces), stop), [300 + i for i in range(len(pieces))]


def push_each(stream: TextStream, tokens: Sequence[int], finish_reason: str | None = "length") -> list[str]:
    texts = []
    for i, token in enumerate(tokens):
        texts.append(stream.push([token], finish_reason if i == len(tokens) - 1 else None))
        if stream.finish_reason is not None:
            break
    return texts


def test_a_character_appears_when_its_last_byte_does() -> None:
    stream = TextStream(ByteTokens())
    texts = push_each(stream, "aé€😀".encode())
    assert texts == ["a", "", "é", "", "", "€", "", "", "", "😀"]


def test_bytes_that_can_no_longer_be_a_character_are_replaced_at_once() -> None:
    stream = TextStream(ByteTokens())
    assert push_each(stream, b"\xe2\x82A\xffB", None) == ["", "", "\ufffdA", "\ufffd", "B"]


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    stream = TextStream(ByteTokens())
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.push([0x98], "length") == "\ufffd"


def test_special_tokens_count_and_show_nothing() -> None:
    stream = TextStream(ByteTokens())
    assert stream.push([65, ByteTokens.SPECIAL, 66]) == "AB"
    assert stream.completion_tokens == 3


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_a_stop_token_counts_and_shows_nothing(stop: list[str]) -> None:
    stream = TextStream(ByteTokens(), stop)
    assert stream.push([65, 66], "stop", 66) == "A"
    assert (stream.completion_tokens, stream.finish_reason, stream.stop_string) == (2, "stop", None)


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    stream, tokens = stream_of([b"one EN", b"D", b" two"], ["END"])
    assert push_each(stream, tokens) == ["one ", ""]
    assert (stream.completion_tokens, stream.finish_reason, stream.stop_string) == (2, "stop", "END")


def test_what_was_held_comes_out_when_it_is_no_stop() -> None:
    stream, tokens = stream_of([b"EN", b"E", b"N", b"C"], ["END"])
    assert push_each(stream, tokens, None) == ["", "EN", "", "ENC"]


def test_holds_no_more_than_the_beginning_of_a_stop() -> None:
    stream, tokens = stream_of([b"aaab", b"aab"], ["aabaac"])
    assert push_each(stream, tokens, None) == ["a", "aab"]


def test_what_is_held_comes_out_at_the_end() -> None:
    stream, tokens = stream_of([b"wait EN"], ["END"])
    assert stream.push(tokens, "length") == "wait EN"
    assert stream.finish_reason == "length"


def test_the_stop_that_is_complete_first_wins_even_inside_one_token() -> None:
    stream, tokens = stream_of([b"a long stop and end"], ["end", "stop", "long stop"])
    assert push_each(stream, tokens) == ["a "]
    assert stream.stop_string == "long stop"


def test_tokens_after_the_stop_in_the_same_output_do_not_count() -> None:
    stream, tokens = stream_of([b"x", b".", b"y", b"z"], ["."])
    assert stream.push(tokens) == "x"
    assert stream.completion_tokens == 2
    assert stream.push(tokens, "length") == ""
    assert stream.completion_tokens == 2
    assert stream.finish_reason == "stop"


def test_a_stop_whose_last_character_is_cut_counts_to_its_last_byte() -> None:
    stream = TextStream(ByteTokens(), ["é"])
    assert stream.push([65, 0xC3]) == "A"
    assert stream.completion_tokens == 2
    assert stream.push([0xA9]) == ""
    assert (stream.completion_tokens, stream.finish_reason) == (3, "stop")


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_a_stop_token_shows_where_it_is_asked_for(stop: list[str]) -> None:
    stream = TextStream(ByteTokens(), stop, include_stop=True, locate=True)
    assert stream.push([65, 66], "stop", 66) == "AB"
    assert (stream.completion_tokens, stream.finish_reason, stream.stop_string) == (2, "stop", None)
    assert (stream.starts, stream.shown_tokens) == ([0, 1], 2)


def test_the_end_of_a_grammar_is_no_stop_token() -> None:
    stream = TextStream(ByteTokens())
    assert stream.push([65, 66], "stop") == "AB"
    assert (stream.completion_tokens, stream.finish_reason) == (2, "stop")


def test_a_stop_string_shows_where_it_is_asked_for() -> None:
    stream = TextStream(ByteTokens([b"one EN", b"D", b" two"]), ["END", "N"], include_stop=True)
    assert push_each(stream, [300, 301, 302]) == ["one EN"]
    stream = TextStream(ByteTokens([b"one EN", b"D and", b" two"]), ["END"], include_stop=True)
    assert push_each(stream, [300, 301, 302]) == ["one ", "END"]
    assert (stream.completion_tokens, stream.stop_string) == (2, "END")


def test_a_stop_string_before_the_least_number_of_tokens_is_text() -> None:
    stream = TextStream(ByteTokens([b"a.", b".", b"b", b"."]), [".", ".."], min_tokens=3)
    assert push_each(stream, [300, 301, 302, 303]) == ["a", ".", ".b", ""]
    assert (stream.completion_tokens, stream.stop_string) == (4, ".")
    # The one that is complete with the last of them counts.
    stream = TextStream(ByteTokens([b"a.", b"."]), ["."], min_tokens=2)
    assert push_each(stream, [300, 301]) == ["a.", ""]


def test_a_stop_that_was_let_pass_may_begin_the_next() -> None:
    stream = TextStream(ByteTokens([b"abab", b"ab", b"x"]), ["abab"], min_tokens=2)
    assert push_each(stream, [300, 301, 302]) == ["ab", ""]
    assert stream.stop_string == "abab"


def test_where_tokens_begin() -> None:
    stream = TextStream(ByteTokens([b"a ", "é".encode()[:1], "é".encode()[1:], b"b"]), locate=True)
    assert push_each(stream, [300, 301, 302, ByteTokens.SPECIAL, 303]) == ["a ", "", "é", "", "b"]
    assert stream.starts == [0, 2, 2, 3, 3]
    assert stream.shown_tokens == 5


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(ByteTokens(), ["a", ""])


def whole(data: bytes, ends: Sequence[int], stop: Sequence[str]) -> tuple[str, int, str]:
    """The text, token count and finish reason of ``data``, decoded at once; ``ends``: where its tokens end."""
    text = data.decode("utf-8", "replace")
    found = [(text.index(s) + len(s), -len(s)) for s in stop if s in text]
    if not found:
        return text, len(ends), "length"
    end, minus_length = min(found)
    for count, cut in enumerate(ends, 1):
        last = cut == len(data)
        seen = data[:cut].decode("utf-8", "replace") if last else _certain(data[:cut])
        if len(seen) >= end:
            return text[: end + minus_length], count, "stop"
    raise AssertionError("unreachable")


def _certain(data: bytes) -> str:
    """``data`` as text, without a last character that more bytes could complete."""
    for tail in range(1, 4):
        piece = data[-tail:]
        if len(piece) < tail or _is_character(piece):
            break
        if any(_is_character(piece + more) for more in _CONTINUATIONS):
            return data[:-tail].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


_CONTINUATIONS = [bytes(c) for n in range(1, 4) for first in (0x80, 0x90, 0xA0) for c in [[first] + [0x80] * (n - 1)]]


def _is_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False


def _cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


SOME_TEXT = st.lists(st.sampled_from(["a", "b", "ab", "aab", "é", "€", "😀", " ", "E", "EN", "END"]), max_size=12).map(
    "".join
)
SOME_BYTES = st.lists(
    SOME_TEXT.map(str.encode)
    | st.binary(max_size=3)
    | st.sampled_from([b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3", b"\x80"]),
    max_size=6,
).map(b"".join)
STOPS = st.lists(st.text("abéEND€😀 \ufffd", min_size=1, max_size=4), max_size=3)


@settings(max_examples=700, deadline=None)
@given(SOME_BYTES, STOPS, st.lists(st.integers(0, 200), max_size=20), st.lists(st.integers(0, 200), max_size=8))
@example(b"aabaab\xe2\x82", ["aabaac", "b\ufffd"], [1, 3], [])
def test_streamed_is_whole_whatever_the_cuts(data: bytes, stop: list[str], cuts: list[int], calls: list[int]) -> None:
    pieces = _cut(data, cuts)
    if not pieces:
        return
    stream, tokens = stream_of(pieces, stop)
    ends = [sum(len(p) for p in pieces[: i + 1]) for i in range(len(pieces))]
    text, count, reason = whole(data, ends, stop)
    got = ""
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in calls)})
    for a, b in itertools.pairwise(edges):
        got += stream.push(tokens[a:b], "length" if b == len(tokens) else None)
        assert text.startswith(got), "text was taken back"
        if stream.finish_reason is None:
            seen = _certain(data[: ends[b - 1]])
            assert seen.startswith(got)
            held = seen[len(got) :]
            assert not held or any(s.startswith(held) for s in stop), "more is held back than need be"
    assert (got, stream.completion_tokens, stream.finish_reason) == (text, count, reason)


@settings(max_examples=400, deadline=None)
@given(SOME_BYTES, STOPS, st.lists(st.integers(0, 200), max_size=20), st.integers(1, 7))
def test_tokens_are_shown_as_their_text_is(data: bytes, stop: list[str], cuts: list[int], size: int) -> None:
    """A token counts as shown once a character that it began is out, and never shows where the text ends before it."""
    pieces = _cut(data, cuts)
    if not pieces:
        return
    stream = TextStream(ByteTokens(pieces), stop, locate=True)
    tokens = [300 + i for i in range(len(pieces))]
    text, shown = "", 0
    for at in range(0, len(tokens), size):
        text += stream.push(tokens[at : at + size], "length" if at + size >= len(tokens) else None)
        assert shown <= stream.shown_tokens <= len(stream.starts)
        shown = stream.shown_tokens
        if stream.finish_reason is not None:
            break
        assert all(start < len(text) for start in stream.starts[:shown])
        assert all(start >= len(text) for start in stream.starts[shown:])
    assert stream.starts == sorted(stream.starts)
    if stream.stop_string is None:
        assert shown == len(tokens)
    else:
        assert all(start < len(text) for start in stream.starts[:shown])
        assert all(start >= len(text) for start in stream.starts[shown:])
