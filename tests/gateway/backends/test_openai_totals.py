"""What an answer in OpenAI's words came to, where its backend tells only part of it, or only for part of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.backends.backend import Order
from gateway.backends.openai_reader import EventReader, GatheringReader, WholeReader
from gateway.backends.openai_totals import Totals
from gateway.billing.usage import TokenUsage
from tests.gateway.backends.test_openai_reader import chunk, order, read, usage
from worker.protocol.sse import encode_event

SAID = "abcd" * 5
"""Five tokens, by an estimate; a prompt is of ten."""


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"prompt_tokens": 9}, TokenUsage(9, 5, source="estimated")),
        ({"prompt_tokens": 9, "completion_tokens": None}, TokenUsage(9, 5, source="estimated")),
        ({"prompt_tokens": 9, "completion_tokens": "3"}, TokenUsage(9, 5, source="estimated")),
        ({"prompt_tokens": 9, "completion_tokens": -3}, TokenUsage(9, 5, source="estimated")),
        ({"prompt_tokens": 9, "completion_tokens": 10**30}, TokenUsage(9, 5, source="estimated")),
        ({"completion_tokens": 3}, TokenUsage(10, 3, source="estimated")),
        ({"prompt_tokens": {}, "completion_tokens": 3}, TokenUsage(10, 3, source="estimated")),
        ({"prompt_tokens": 0, "completion_tokens": 0}, TokenUsage()),
        ({"prompt_tokens": 9, "completion_tokens": 0}, TokenUsage(9)),
    ],
)
def test_what_is_not_told_is_estimated_and_what_is_told_is_believed(told: dict[str, Any], wanted: TokenUsage) -> None:
    answer = {"choices": [{"message": {"content": SAID}}], "usage": told}
    assert read(WholeReader(order(streamed=False)), [json.dumps(answer).encode()]).usage == wanted
    apart = wire(chunk(SAID), {"choices": [], "usage": told})
    beside = wire(chunk(SAID, usage=told))
    for stream in (apart, beside):
        assert read(EventReader(order()), [stream + b"data: [DONE]\n\n"]).usage == wanted
        assert read(GatheringReader(order(streamed=False)), [stream + b"data: [DONE]\n\n"]).usage == wanted


def test_parts_of_one_report_in_several_events() -> None:
    stream = wire({"choices": [], "usage": {"prompt_tokens": 9}}, chunk(), chunk(usage={"completion_tokens": 2}))
    assert read(EventReader(order()), [stream + b"data: [DONE]\n\n"]).usage == TokenUsage(9, 2)


def test_what_is_said_behind_a_report_counts_until_the_next_one() -> None:
    reader = EventReader(order())
    assert reader.feed(wire({"choices": [], "usage": usage(9, 0)})).usage == TokenUsage(9)
    assert reader.feed(wire(chunk(SAID))).usage == TokenUsage(9, 5, source="estimated")
    assert reader.feed(wire(chunk(usage=usage(9, 4)))).usage == TokenUsage(9, 4)
    assert reader.feed(b": alive\n\n").usage is None
    assert reader.feed(wire(chunk(SAID))).usage == TokenUsage(9, 9, source="estimated")


@pytest.mark.parametrize("ending", [b"", b'data: {"error": {"message": "broken"}}\n\n'])
def test_an_early_report_does_not_make_what_breaks_off_free(ending: bytes) -> None:
    came = read(EventReader(order()), [wire({"choices": [], "usage": usage(9, 0)}, chunk(SAID)) + ending])
    assert (came.complete, came.usage) == (False, TokenUsage(9, 5, source="estimated"))


def test_at_the_good_end_an_early_report_is_the_truth() -> None:
    stream = wire({"choices": [], "usage": usage(9, 3)}, chunk(SAID))
    assert read(EventReader(order()), [stream + b"data: [DONE]\n\n"]).usage == TokenUsage(9, 3)


def test_an_estimate_stays_below_what_was_reserved_and_a_report_need_not() -> None:
    capped: Order = order(output_tokens=6)
    stream = wire(chunk(SAID, usage=usage(9, 4)), chunk(SAID))
    assert read(EventReader(capped), [stream]).usage == TokenUsage(9, 6, source="estimated")
    stream = wire(chunk(SAID, usage=usage(9, 7)), chunk(SAID))
    assert read(EventReader(capped), [stream]).usage == TokenUsage(9, 7, source="estimated")


def test_embeddings_have_no_output_that_could_be_missing() -> None:
    totals = Totals(order(api="embeddings", streamed=False))
    assert not totals.told({"prompt_tokens": 8, "total_tokens": 8})
    assert totals.final() == TokenUsage(8)


def wire(*events: dict[str, Any]) -> bytes:
    return b"".join(encode_event(json.dumps(each).encode()) for each in events)
