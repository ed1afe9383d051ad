from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.sse import Comment, Framer
from worker.protocol.usage import MeterReading, decode_meter, encode_meter

counts = st.integers(0, 2**40)


@given(counts, counts, counts, counts)
def test_a_reading_survives_the_wire(prompt: int, completion: int, cached: int, compute_us: int) -> None:
    reading = MeterReading(prompt, completion, cached, compute_us)
    (comment,) = Framer().feed(encode_meter(reading))
    assert isinstance(comment, Comment)
    assert decode_meter(comment.text) == reading


def test_a_meter_line_does_not_disturb_the_event_after_it() -> None:
    framer = Framer()
    items = framer.feed(encode_meter(MeterReading(3, 1)) + b"data: x\n\n")
    assert [type(item).__name__ for item in items] == ["Comment", "Event"]


@given(st.binary(max_size=60))
def test_other_comments_are_not_readings(text: bytes) -> None:
    assert decode_meter(b"penstock-meter " + text + b"~") is None
    assert decode_meter(text) is None or text.startswith(b"penstock-meter ")
