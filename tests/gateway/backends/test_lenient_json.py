from __future__ import annotations

import json

import pytest

from gateway.ask import Untranslatable
from gateway.backends.lenient_json import strict
from gateway.backends.mending import Mending


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (rb'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
        (rb'{"a\ude00": "\ud83d\u0000"}', {"a\ufffd": "\ufffd\0"}),
        (rb'["\ude00\ud83d\ud83d\ude00"]', ["\ufffd\ufffd\U0001f600"]),
        (b"[NaN, -Infinity, 1.5]", [None, None, 1.5]),
    ],
)
def test_what_is_nearly_json_becomes_json(data: bytes, value: object) -> None:
    mended = strict(data)
    assert mended is not None
    assert json.loads(mended) == value


@pytest.mark.parametrize("data", [b'{"a": 1}', b"{", b"", b"\xff", b"[" * 10_000, b"NaN" * 9])
def test_json_and_what_is_nothing_like_it_are_left(data: bytes) -> None:
    assert strict(data) is None


class Strictly:
    """A translator that takes JSON alone."""

    def event(self, data: bytes) -> list[bytes]:
        return [self.whole(data)]

    def end(self) -> list[bytes]:
        return [b"end"]

    def whole(self, body: bytes) -> bytes:
        if b"NaN" in body or b"1" not in body:
            raise Untranslatable("is none")
        return body


def test_a_translator_gets_what_it_cannot_read_once_more_as_json() -> None:
    mending = Mending(Strictly())
    assert mending.event(b"[1, NaN]") == [b"[1, null]"] == [mending.whole(b"[1, NaN]")]
    assert (mending.event(b"[1]"), mending.end()) == ([b"[1]"], [b"end"])
    for data in (b"[2]", b"[NaN]", b"{"):
        with pytest.raises(Untranslatable):
            mending.event(data)
        with pytest.raises(Untranslatable):
            mending.whole(data)
