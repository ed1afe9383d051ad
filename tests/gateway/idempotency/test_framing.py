from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.idempotency.framing import Unframer, frame


@given(st.lists(st.binary(max_size=20), max_size=10), st.data())
def test_events_survive_every_cut(events: list[bytes], data: st.DataObject) -> None:
    stream = frame(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    unframer = Unframer()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += unframer.feed(stream[start:end])
    assert found == events
    assert unframer.empty


def test_what_is_held_is_told() -> None:
    unframer = Unframer()
    assert unframer.feed(frame([b"abc"])[:-1]) == []
    assert not unframer.empty
