"""Anthropic's answers, cut anywhere and bent in every way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.anthropic_errors import refusal
from gateway.backends.anthropic_reader import MOST_HELD, MessageBody, MessageEvents
from gateway.backends.backend import Order, Reader, Reading
from gateway.backends.faults import BackendError
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Target
from gateway.translation.chat_answer import ChatAnswer
from tests.standins.anthropic_words import TEXT, THINKING, TOOL, USAGE, encoded, error, events_of, message, on_the_wire

ANSWER = message(THINKING, TEXT, TOOL, stop_reason="tool_use")
STREAM = on_the_wire(*events_of(ANSWER))
ALL = TokenUsage(119, 30, 100, cache_write_tokens=7, reasoning_tokens=9)
STOP = {"type": "message_stop"}


def order(**more: Any) -> Order:
    values: dict[str, Any] = {
        "request_id": "0199",
        "model": "m",
        "targets": (Target("pool", "m"),),
        "context_length": 1000,
        "body": {},
        "streamed": True,
        "include_usage": True,
        "output_cap": 40,
        "output_tokens": 40,
        "clamp_output": False,
        "salt": "s",
        "tenant": "t",
        "prompt_bytes": 100,
        "api": "messages",
    }
    return Order(**(values | more))


def read(reader: Reader, chunks: Iterable[bytes]) -> Reading:
    """All that it came to."""
    total = Reading()
    for reading in [*map(reader.feed, chunks), reader.end()]:
        total.events += reading.events
        total.usage = reading.usage or total.usage
        total.complete = total.complete or reading.complete
        assert total.fault is None or not (reading.events or reading.complete or reading.fault)
        total.fault = total.fault or reading.fault
    assert total.complete != (total.fault is not None)
    return total


def translated() -> MessageEvents:
    return MessageEvents(order(), translator=ChatAnswer("m", 1, include_usage=True))


def test_a_stream_that_is_cut_at_every_byte() -> None:
    with_crlf = STREAM.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    commented = b"\xef\xbb\xbf: hello\n\n" + STREAM.replace(b'","delta":', b'",\ndata: "delta":', 3)
    for stream in (STREAM, with_crlf, commented):
        for make in (lambda: MessageEvents(order()), translated):
            at_once = read(make(), [stream])
            assert at_once.complete
            assert at_once.usage == ALL
            for cut in range(0, len(stream), 1 if stream is STREAM else 7):
                assert read(make(), [stream[:cut], stream[cut:]]) == at_once
            assert read(make(), [stream[at : at + 1] for at in range(len(stream))]) == at_once


def test_only_the_models_name_is_changed() -> None:
    sent = [encoded(event) for event in events_of(ANSWER)]
    assert read(MessageEvents(order()), [STREAM]).events == [
        sent[0].replace(b'"claude-sonnet-4-6"', b'"m"'),
        *sent[1:],
    ]
    # As older answers have it: behind the content, with spaces; and beside others of that name, whose values stay.
    start = (
        b'{"type": "message_start", "message": {"id": "msg", "type": "message", "role": "assistant", "content": [], '
        b'"model": "claude", "extra": {"n": 1.50, "a": "model"}, "usage": {"input_tokens": 1, "output_tokens": 1}}}'
    )
    found = read(MessageEvents(order()), [b"data: " + start + b"\n\n" + on_the_wire(STOP)]).events[0]
    assert json.loads(found) == json.loads(start.replace(b'"claude"', b'"m"'))
    assert b'{"n": 1.50, "a": "model"}' in found
    once = start.replace(b', "a": "model"', b"")
    found = read(MessageEvents(order()), [b"data: " + once + b"\n\n" + on_the_wire(STOP)]).events[0]
    assert found == once.replace(b'"claude"', b'"m"')


@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_a_cut_stream_is_no_end(length: int) -> None:
    events = [event for event in events_of(ANSWER) if event["type"] != "message_stop"]
    reading = read(MessageEvents(order()), [on_the_wire(*events[:length])])
    assert reading.fault is not None
    assert reading.fault.code == "backend_disconnected"


def test_what_is_not_utf8_comes_out_as_such() -> None:
    bad = b"ab\xe6\x97 \xff"
    wire = on_the_wire(*events_of(message({"type": "text", "text": "Text."}))).replace(b"Text.", bad)
    body = encoded(message({"type": "text", "text": "Text."})).replace(b"Text.", bad)
    for reader, sent in ((MessageEvents(order()), wire), (MessageBody(order()), body)):
        came = read(reader, [sent])
        assert came.complete
        text = b"".join(came.events).decode()
        assert [text.count(each) for each in ("ab\ufffd", " \ufffd")] == [1, 1]


def test_output_is_estimated_until_it_is_told() -> None:
    reader = MessageEvents(order())
    said = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x" * 80}}
    start, *_, delta, _ = events_of(ANSWER)
    assert reader.feed(on_the_wire(start)).usage == TokenUsage(119, 1, 100, cache_write_tokens=7)
    assert reader.feed(on_the_wire(said)).usage == TokenUsage(119, 20, 100, "estimated", cache_write_tokens=7)
    assert reader.feed(on_the_wire({"type": "ping"})).usage is None
    # Never more than was reserved for.
    many = reader.feed(on_the_wire(*[said] * 9)).usage
    assert many == TokenUsage(119, 40, 100, "estimated", cache_write_tokens=7)
    assert reader.feed(on_the_wire(delta)).usage == ALL
    # The last value counts, and what it leaves out stays.
    assert reader.feed(on_the_wire(delta | {"usage": {"output_tokens": 31}})).usage == TokenUsage(
        119, 31, 100, cache_write_tokens=7, reasoning_tokens=9
    )
    assert reader.feed(on_the_wire(said)).usage is None
    assert reader.feed(on_the_wire(STOP)).complete


def test_a_backend_that_tells_no_usage_is_estimated_whole() -> None:
    silent = message(TEXT, usage={})
    reading = read(MessageEvents(order()), [on_the_wire(*events_of(silent))])
    assert reading.complete
    assert reading.usage is not None
    assert (reading.usage.source, reading.usage.prompt_tokens) == ("estimated", 25)
    assert 5 <= reading.usage.completion_tokens <= 10
    whole = read(MessageBody(order(streamed=False)), [encoded(silent)])
    assert whole.usage is not None
    assert (whole.usage.source, whole.usage.prompt_tokens) == ("estimated", 25)


def test_events_of_a_later_day_are_passed_on_and_not_translated() -> None:
    new = {"type": "of_tomorrow", "index": "x", "delta": [1]}
    start, *others = events_of(message(TEXT))
    stream = on_the_wire(start, new, *others)
    assert encoded(new) in read(MessageEvents(order()), [stream]).events
    assert read(translated(), [stream]).events == read(translated(), [on_the_wire(start, *others)]).events


def test_what_comes_before_the_content_is_kept_back_but_not_for_ever() -> None:
    reader = MessageEvents(order())
    start, first, *_ = events_of(message(TEXT))
    ping = {"type": "ping"}
    assert reader.feed(on_the_wire(start, ping)).events == []
    assert len(reader.feed(on_the_wire(first)).events) == 3
    assert reader.feed(on_the_wire(ping)).events == [encoded(ping)]
    patient = MessageEvents(order())
    assert len(patient.feed(on_the_wire(start, *[ping] * MOST_HELD)).events) == MOST_HELD + 1


@pytest.mark.parametrize(
    ("kind", "status", "code", "retryable"),
    [
        ("overloaded_error", 503, "overloaded_error", True),
        ("rate_limit_error", 429, "rate_limit_error", True),
        ("api_error", 500, "api_error", True),
        ("invalid_request_error", 400, "invalid_request_error", False),
        ("timeout_error", 504, "backend_timeout", True),
        ("authentication_error", 502, "backend_unauthorized", True),
        ("not_found_error", 502, "backend_not_found", True),
        ("of_tomorrow", 500, "backend_error", True),
    ],
)
def test_errors_in_a_stream(kind: str, status: int, code: str, retryable: bool) -> None:
    start, first, *_ = events_of(ANSWER)
    reading = read(MessageEvents(order()), [on_the_wire(start, first, error(kind, "So it is"), STOP)])
    fault = reading.fault
    assert fault is not None
    assert (fault.status, fault.code, fault.retryable) == (status, code, retryable)
    assert len(reading.events) == 2
    whole = read(MessageBody(order(streamed=False)), [encoded(error(kind, "So it is"))]).fault
    assert whole is not None
    assert (whole.status, whole.code) == (status, code)


@pytest.mark.parametrize(
    "event",
    [
        b"[DONE]",
        b"{",
        b"7",
        b"{}",
        b'{"type":null}',
        b'{"type":"error"}',
        b'{"type":"error","error":"x"}',
        b'{"type":"error","error":{"type":7}}',
        b'{"type":"message_stop"}',
        b'{"a":' * 10_000 + b"}" * 10_000,
        b'{"type":"\xff"}',
    ],
)
def test_what_is_no_event_of_the_api_is_a_fault(event: bytes) -> None:
    reading = read(MessageEvents(order()), [b"data: " + event + b"\n\n"])
    assert reading.events == []
    assert reading.fault is not None
    assert reading.fault.retryable


@pytest.mark.parametrize(
    "event", [b'{"type":"message_delta","delta":[]}', b'{"type":"content_block_start","content_block":{"type":7}}']
)
def test_what_cannot_be_translated_is_a_fault(event: bytes) -> None:
    reading = read(translated(), [on_the_wire(events_of(ANSWER)[0]) + b"data: " + event + b"\n\n"])
    assert reading.fault is not None
    assert reading.fault.code == "backend_protocol_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"type":"completion"}', b"<html>", b"[" * 10_000])
def test_a_body_that_is_no_message(body: bytes) -> None:
    for translator in (None, ChatAnswer("m", 1)):
        reading = read(MessageBody(order(streamed=False), translator=translator), [body])
        assert reading.fault is not None
        assert reading.fault.code == "backend_protocol_error"


def test_a_whole_body_in_pieces() -> None:
    body = encoded(ANSWER)
    at_once = read(MessageBody(order(streamed=False)), [body])
    assert at_once.usage == ALL
    assert at_once.events == [body.replace(b'"claude-sonnet-4-6"', b'"m"')]
    assert read(MessageBody(order(streamed=False)), [body[at : at + 9] for at in range(0, len(body), 9)]) == at_once


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["message", "delta", "usage", "index", "content_block", "error"]
EVENTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["message_start", "content_block_start", "content_block_delta", "message_delta", "error"]
        )
    },
    optional={name: JSON | st.just(USAGE) for name in FIELDS},
)


@given(events=st.lists(EVENTS | st.sampled_from(events_of(ANSWER)) | JSON, max_size=8), cut=st.integers(0, 400))
def test_whatever_comes_nothing_is_raised(events: list[Any], cut: int) -> None:
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    for make in (lambda: MessageEvents(order()), translated):
        read(make(), [stream[:cut], stream[cut:]])
    for event in events:
        read(MessageBody(order(streamed=False), translator=ChatAnswer("m", 1)), [json.dumps(event).encode()])


# Refusals.


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 408, 409, 413, 422, 429, 500, 502, 503, 504, 529])
@pytest.mark.parametrize("body", [None, b"", b"<html>Bad gateway</html>", b'{"error":"x"}', b"[" * 9999])
def test_refusals_in_no_shape(status: int, body: bytes | None) -> None:
    fault = refusal(status, body, "3")
    assert not isinstance(fault, BackendError)
    assert 413 <= fault.status <= 504
    assert fault.retryable == (status in (401, 402, 403, 404, 405, 408, 429) or status >= 500)
    assert fault.unhealthy == (status in (401, 402, 403, 404, 405, 408) or status >= 500)
    assert fault.retry_after_s == (3 if status in (429, 503, 529) else None)


@pytest.mark.parametrize("header", ["soon\r\nx: y", "9" * 100, "\x00", ""])
def test_a_retry_after_that_is_none(header: str) -> None:
    fault = refusal(429, encoded(error("rate_limit_error", "Slow down")), header)
    assert isinstance(fault, BackendError)
    assert fault.retry_after is None
    assert fault.retry_after_s is None


def test_secrets_are_not_passed_on() -> None:
    said = error("invalid_request_error", "The header x-api-key: a-secret-of-ours or sk-ant-api03-abcdef is odd")
    fault = refusal(400, encoded(said), None, secrets=["a-secret-of-ours"])
    assert isinstance(fault, BackendError)
    for told in (fault.body, fault.error().encode()):
        assert b"secret-of-ours" not in told
        assert b"api03" not in told
        assert b"***" in told
