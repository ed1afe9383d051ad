"""Bytes of an answer, cut anywhere and hostile in every way, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.backend import Order, Reader, Reading
from gateway.backends.faults import BackendFault
from gateway.backends.lenient_json import decoded
from gateway.backends.openai_reader import EventReader, GatheringReader, WholeReader
from gateway.billing.normalise import MAX_TOKENS
from gateway.billing.usage import TokenUsage
from worker.protocol.sse import encode_event


def order(**changes: Any) -> Order:
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "targets": (),
        "context_length": 1000,
        "body": {},
        "streamed": True,
        "include_usage": False,
        "output_cap": 100,
        "clamp_output": False,
        "salt": "s",
        "tenant": "t",
        "prompt_bytes": 40,
    }
    return Order(**(values | changes))


@dataclass
class Came:
    """All that a reader made of an answer."""

    events: list[bytes] = field(default_factory=list)
    usage: TokenUsage | None = None
    complete: bool = False
    fault: BackendFault | None = None

    def take(self, reading: Reading) -> None:
        if self.fault is not None or self.complete:
            assert reading == Reading()
            return
        self.events += reading.events
        self.usage = reading.usage or self.usage
        self.complete = reading.complete
        self.fault = reading.fault

    @property
    def code(self) -> str | None:
        return None if self.fault is None else self.fault.code


def read(reader: Reader, pieces: Sequence[bytes]) -> Came:
    came = Came()
    for piece in pieces:
        came.take(reader.feed(piece))
    came.take(reader.end())
    return came


def stream(*events: object, done: bool = True, **changes: Any) -> Came:
    """What comes of a stream of these, JSON or bytes."""
    data = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in events]
    wire = b"".join(map(encode_event, [*data, *([b"[DONE]"] if done else [])]))
    return read(EventReader(order(**changes)), [wire])


def chunk(text: str | None = "a", **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"id": "c", "model": "theirs", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} | more


def usage(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


# Mixed line ends, comments, data over several lines, wide characters, tool calls, no last blank line.
RECORDING = (
    b"\xef\xbb\xbf: connected\r\n\r\n"
    b'data: {"id":"c1","object":"chat.completion.chunk","model":"theirs","choices":[{"index":0,"delta":'
    b'{"role":"assistant","content":""},"finish_reason":null}]}\r\n\r\n'
    + 'data: {"id":"c1","model":"theirs","choices":[{"index":0,"delta":{"content":"Grüße 世界 👩‍👩‍👧 "}}]}\n\n'.encode()
    + b": keep-alive\n\nevent: message\rid: 7\rretry: 100\r"
    + 'data: {"id":"c1","choices":[{"index":0,\rdata: "delta":{"content":"\\ud83d\\ude00 ﷽\\n"}}],\r'.encode()
    + b'data: "model":"theirs"}\r\r'
    b'data:{"id":"c1","model":"theirs","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1",'
    b'"type":"function","function":{"name":"f","arguments":"{\\"city\\": \\"Z"}}]}}]}\n\n:\n\n'
    + (
        'data: {"id":"c1","model":"theirs","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":'
        '{"arguments":"ürich\\"}"}}]},"finish_reason":"tool_calls"}],"usage":null}\r\n\r\n'
    ).encode()
    + b'data: {"id":"c1","model":"theirs","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7,'
    b'"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    b"data: [DONE]"
)


def said(came: Came) -> tuple[str, str]:
    text = arguments = ""
    for data in came.events:
        for choice in json.loads(data)["choices"]:
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                arguments += call["function"]["arguments"]
    return text, arguments


def check_recording(came: Came, wanted: bool) -> None:
    assert (came.complete, came.fault) == (True, None)
    assert came.usage == TokenUsage(11, 7, 5)
    assert said(came) == ("Grüße 世界 👩‍👩‍👧 😀 ﷽\n", '{"city": "Zürich"}')
    assert len(came.events) == (6 if wanted else 5)
    assert {json.loads(data)["model"] for data in came.events} == {"m"}
    assert [json.loads(data).get("usage") for data in came.events if json.loads(data).get("usage")] == (
        [{"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}] if wanted else []
    )


@pytest.mark.parametrize("wanted", [False, True])
def test_a_recorded_stream_cut_at_every_byte_comes_out_the_same(wanted: bool) -> None:
    whole = read(EventReader(order(include_usage=wanted)), [RECORDING])
    check_recording(whole, wanted)
    for cut in range(len(RECORDING) + 1):
        came = read(EventReader(order(include_usage=wanted)), [RECORDING[:cut], RECORDING[cut:]])
        check_recording(came, wanted)
        assert came.events == whole.events
    assert read(EventReader(order(include_usage=wanted)), [bytes([byte]) for byte in RECORDING]).events == whole.events


@given(st.lists(st.integers(0, len(RECORDING)), max_size=12))
def test_a_recorded_stream_cut_anywhere_comes_out_the_same(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(RECORDING)]
    check_recording(read(EventReader(order()), [RECORDING[start:end] for start, end in pairwise(places)]), False)


def test_a_recorded_stream_that_ends_early_is_never_whole() -> None:
    whole = read(EventReader(order(include_usage=True)), [RECORDING]).events
    for end in range(len(RECORDING)):
        came = read(EventReader(order(include_usage=True)), [RECORDING[:end]])
        assert came.code == "backend_disconnected", end
        assert not came.complete
        assert came.events == whole[: len(came.events)]


@given(st.lists(st.binary(max_size=60), max_size=20), st.booleans(), st.booleans())
def test_nothing_that_a_backend_sends_raises(pieces: list[bytes], streamed: bool, wanted: bool) -> None:
    asked = order(streamed=streamed, include_usage=wanted)
    for reader in (EventReader(asked), GatheringReader(asked), WholeReader(asked)):
        came = read(reader, pieces)
        assert came.complete != (came.fault is not None)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
FIELDS = st.dictionaries(
    st.sampled_from(["choices", "usage", "error", "model", "object", "message", "detail", "code"]), HOSTILE, max_size=5
)


@given(st.lists(FIELDS, max_size=5), st.booleans())
def test_no_json_that_a_backend_sends_raises(events: list[dict[str, Any]], streamed: bool) -> None:
    asked = order(streamed=streamed, include_usage=True)
    data = [json.dumps(each).encode() for each in events]
    wire = b"".join(map(encode_event, [*data, b"[DONE]"]))
    for reader in (EventReader(asked), GatheringReader(asked)):
        came = read(reader, [wire])
        assert came.complete != (came.fault is not None)
    for each in data:
        came = read(WholeReader(asked), [each])
        assert came.complete != (came.fault is not None)
        if came.fault is not None:
            assert 400 <= came.fault.error().status < 600
            json.loads(came.fault.error().encode())


# Usage.


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        [],
        "12",
        usage(None, None),
        usage(-1, -5),
        usage(1.5, 2.25),
        usage(True, False),
        usage("9", "3"),
        usage(MAX_TOKENS + 1, 10**30),
        usage({}, []),
    ],
)
def test_usage_that_is_no_count_is_as_good_as_none(told: Any) -> None:
    came = stream(chunk("abcdefgh"), chunk(None, usage=told))
    assert came.usage == TokenUsage(10, 2, source="estimated")
    assert came.complete


def test_nan_for_usage_is_no_json_and_no_crash() -> None:
    came = stream(chunk(), b'{"choices":[],"usage":{"prompt_tokens":NaN,"completion_tokens":Infinity}}')
    assert came.usage == TokenUsage(10, 1, source="estimated")
    assert len(came.events) == 1


def test_running_totals_are_not_added_up() -> None:
    came = stream(*[chunk(usage=usage(9, count)) for count in (1, 2, 3)])
    assert came.usage == TokenUsage(9, 3)
    assert len(came.events) == 3


def test_usage_in_the_last_chunk_with_content_stays_there() -> None:
    came = stream(chunk(), chunk("b", usage=usage(9, 2)))
    assert came.usage == TokenUsage(9, 2)
    assert json.loads(came.events[-1])["usage"] == usage(9, 2)


def test_usage_in_a_choice_is_read() -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", "usage": usage(9, 2)}
    assert stream(chunk(), chunk(None, choices=[choice])).usage == TokenUsage(9, 2)


def test_null_usage_beside_a_told_one_hides_nothing() -> None:
    choice = {"index": 0, "delta": {}, "usage": None}
    data = json.dumps(chunk(choices=[choice], usage=usage(9, 2)), separators=(",", ":")).encode()
    assert stream(data).usage == TokenUsage(9, 2)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_usage_chunk_comes_once_and_last_if_it_is_wanted(wanted: bool) -> None:
    first, last = ({"choices": [], "usage": usage(9, count)} for count in (1, 2))
    came = stream(chunk(), first, chunk("b"), last, include_usage=wanted)
    told = [json.loads(data) for data in came.events]
    assert [each for each in told if not each["choices"]] == ([last] if wanted else [])
    assert told[-1] == (last if wanted else chunk("b") | {"model": "m"})
    assert came.usage == TokenUsage(9, 2)


def test_a_usage_chunk_that_cannot_be_read_is_none_that_was_not_asked_for() -> None:
    came = stream(chunk(), {"choices": [], "usage": usage(-1, None)})
    assert len(came.events) == 1


def test_an_event_without_choices_that_is_not_of_usage_stays() -> None:
    azure = {"choices": [], "prompt_filter_results": [{"prompt_index": 0}], "usage": None}
    assert len(stream(azure, chunk()).events) == 2


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([chunk("", role="assistant"), chunk("a"), chunk("b"), chunk(None)], 2),
        ([chunk("x" * 400)], 100),
        ([chunk("wörld" * 10)], 25),
        ([{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"a": 1}' * 4}}]}}]}], 10),
        ([{"choices": [{"delta": {"reasoning_content": "think" * 8}}]}], 10),
        ([{"choices": [{"text": "abcd" * 3}]}], 3),
    ],
)
def test_what_no_usage_tells_is_estimated_from_the_text(events: list[Any], tokens: int) -> None:
    assert stream(*events).usage == TokenUsage(10, tokens, source="estimated")


def test_an_estimate_is_never_above_what_was_reserved() -> None:
    came = stream(chunk("x" * 4000), output_tokens=100, prompt_bytes=10**9)
    assert came.usage == TokenUsage(1000, 100, source="estimated")
    assert stream(chunk(), prompt_tokens=7).usage == TokenUsage(7, 1, source="estimated")


# Ends.


def test_a_stream_without_its_end_was_cut() -> None:
    finished = chunk(None, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    assert stream(chunk(), finished, done=False).code == "backend_disconnected"


def test_where_a_server_is_not_known_to_send_done_a_reason_to_finish_is_an_end() -> None:
    finished = encode_event(b'{"choices":[{"index":0,"delta":{},"finish_reason" : "stop"}]}')
    told = encode_event(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
    piece = encode_event(b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}')
    for wire, code in (
        (piece + finished, None),
        (piece + finished + told, None),
        (piece + finished.rstrip(), None),
        (finished + piece, "backend_disconnected"),
        (piece, "backend_disconnected"),
        (piece + finished + b"data: {", "backend_disconnected"),
    ):
        came = read(EventReader(order(), ends_with_done=False), [wire])
        assert (came.code, came.complete) == (code, code is None)


@pytest.mark.parametrize("wire", [b"", b"\n\n", b": hi\n\n", b"data: [DONE]\n\n", b"data:\n\ndata: [DONE]\n\n"])
def test_an_answer_of_nothing_is_no_answer(wire: bytes) -> None:
    came = read(EventReader(order()), [wire])
    assert came.code in ("backend_protocol_error", "backend_disconnected")
    assert came.events == []


def test_usage_alone_is_no_answer() -> None:
    came = stream({"choices": [], "usage": usage(9, 0)}, include_usage=True)
    assert (came.code, came.events) == ("backend_protocol_error", [])
    assert came.usage == TokenUsage(9, 0)


def test_nothing_behind_the_end_is_heard() -> None:
    wire = b"".join(
        map(encode_event, [b'{"choices":[{}]}', b"[DONE]", b"[DONE]", b'{"error":{"message":"x"}}', b"junk"])
    )
    came = read(EventReader(order()), [wire, wire])
    assert (came.complete, len(came.events)) == (True, 1)


@pytest.mark.parametrize("done", [b"[DONE]", b" [DONE] ", b"[DONE]\t"])
def test_spaces_around_done_do_not_matter(done: bytes) -> None:
    assert read(EventReader(order()), [encode_event(b'{"choices":[{}]}') + encode_event(done)]).complete


@pytest.mark.parametrize(
    "data",
    [
        *(b"junk", b'"a string"', b"12", b"[1]", b"<html>", b'{"choices":[', b"\x00", b"\xff\xfe"),
        *(b'{"choices":[{"delta":{"content":"a}}]}', b"{}{}", b'{"choices":[{"index":0},]}', b"{not json}"),
        *(b'{"usage":}', b'{"error":}', b'{"choices":[{"delta":{"tool_calls":[}]}', b'{"a":' * 10_000 + b"}" * 10_000),
    ],
)
def test_data_that_is_no_json_object_is_a_fault(data: bytes) -> None:
    came = stream(chunk(), data, chunk("b"))
    assert (came.code, len(came.events), came.complete) == ("backend_protocol_error", 1, False)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_not_utf8_comes_out_as_such(streamed: bool) -> None:
    """Clients that decode strictly, as the official ones do, would raise what is no error of the API."""
    for reader in (EventReader, GatheringReader, WholeReader):
        part = b"delta" if reader is not WholeReader else b"message"
        told = b'{"prompt_tokens":1,"completion_tokens":2}'
        body = b'{"choices":[{"index":0,"%b":{"content":"ab\xe6\x97 \xff"}}],"usage":%b}' % (part, told)
        wire = body if reader is WholeReader else encode_event(body) + b"data: [DONE]\n\n"
        came = read(reader(order(streamed=streamed)), [wire])
        assert (came.complete, came.usage) == (True, TokenUsage(1, 2))
        (event,) = came.events
        assert "ab\ufffd \ufffd" in event.decode()


def test_events_of_nothing_are_signs_of_life() -> None:
    came = read(EventReader(order()), [b"data:\n\ndata: \n\n", encode_event(b'{"choices":[{}]}'), b"data: [DONE]\n\n"])
    assert (came.complete, came.events) == (True, [b'{"choices":[{}]}'])


def test_events_too_long_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backends.openai_reader.EVENT_LIMIT", 1000)
    monkeypatch.setattr("gateway.backends.openai_reader.BODY_LIMIT", 1000)
    for wire in (b"data: " + b"x" * 2000, (b"data: " + b"x" * 900 + b"\n") * 3, b'error: "' + b"x" * 2000):
        assert read(EventReader(order()), [wire]).code == "backend_protocol_error"
    assert read(WholeReader(order()), [b"x" * 600] * 3).code == "backend_protocol_error"
    monkeypatch.setattr("gateway.backends.openai_reader.BODY_LIMIT", 3000)
    whole = encode_event(b'{"data":["' + b"x" * 2000 + b'"]}') + b"data: [DONE]\n\n"
    assert read(EventReader(order(streamed=False)), [whole]).complete  # one event is all of it
    assert read(EventReader(order(streamed=False)), [b"data: " + b"x" * 4000]).code == "backend_protocol_error"
    monkeypatch.setattr("gateway.backends.openai_reader.BODY_LIMIT", 1000)
    many = encode_event(b'{"choices":[{"index":0,"delta":{"content":"' + b"x" * 600 + b'"}}]}')
    assert read(GatheringReader(order(streamed=False)), [many, many, many]).code == "backend_protocol_error"


def test_what_needs_no_change_is_not_touched() -> None:
    strange = (
        b'{ "model" : "m", "choices" : [ {"index":1,"delta":{"audio":{"data":"UklGRg=="},"refusal":"no","new":1.50},'
        b'"logprobs":{"content":[{"token":"error","bytes":[1],"logprob":-1e-7}]},"finish_reason":"new_reason"} ]}'
    )
    assert stream(strange).events == [strange]
    other = strange.replace(b'"m"', b'"theirs"')
    assert stream(other).events == [strange]


# Errors.


def err(**fields: Any) -> dict[str, Any]:
    return {"error": fields}


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        (err(message="x", type="server_error", code=None), 502, "server_error"),
        (
            err(message="x", type="invalid_request_error", code="context_length_exceeded"),
            400,
            "context_length_exceeded",
        ),
        (err(message="x", code=400, type="BadRequestError"), 400, "BadRequestError"),
        (err(message="x", code="429"), 429, "429"),
        (err(message="x", code=429, status="RESOURCE_EXHAUSTED"), 429, "backend_error"),
        (err(message="x", code=500, type="server_error"), 500, "server_error"),
        (err(message="x", code="rate_limit_exceeded", type="tokens"), 429, "rate_limit_exceeded"),
        (err(message="x", code="engine_overloaded"), 503, "engine_overloaded"),
        (err(message="x", code=401, type="authentication_error"), 502, "backend_unauthorized"),
        (err(message="x", code="invalid_api_key"), 502, "backend_unauthorized"),
        (err(message="x", code=404), 502, "backend_not_found"),
        (err(message="x", code=200), 502, "backend_error"),
        (err(message="x", code=True), 502, "backend_error"),
        (err(message="x", code=10**30), 502, "backend_error"),
        (err(message="x", code="Too\x00 Many \ud83d"), 502, "Too_Many"),
        ({"error": "text"}, 502, "backend_error"),
        ({"object": "error", "message": "x", "type": "NotFoundError", "code": 404}, 502, "backend_not_found"),
        ({"object": "error", "message": "x", "type": "BadRequestError", "code": 400}, 400, "BadRequestError"),
        ([err(code=503, message="overloaded", status="UNAVAILABLE")], 503, "backend_error"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, 503, "overloaded_error"),
        (chunk(None) | err(code="server_error", message="x"), 502, "server_error"),
        (err(message=None, code=None, type="x"), 502, "x"),
    ],
)
def test_errors_in_a_stream_have_a_status_and_a_code(event: Any, status: int, code: str) -> None:
    came = stream(chunk(), event, chunk("b"))
    assert came.fault is not None
    assert (came.fault.error().status, came.code, len(came.events)) == (status, code, 1)
    assert json.loads(came.fault.error().encode())["error"]["message"]
    assert came.fault.retryable == (status not in (400,))


OPENINGS = [
    chunk(None, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
    chunk(None, choices=[{"index": 1, "delta": {"role": "assistant", "content": None, "tool_calls": None}}]),
    {"choices": [], "prompt_filter_results": []},
]


def test_a_whole_answer_comes_with_its_end_and_alone() -> None:
    """So that a cut behind it can still go elsewhere, and no backend fills the memory."""
    reader = EventReader(order(streamed=False))
    body = json.dumps(chunk()).encode()
    assert reader.feed(encode_event(body)).events == []
    assert len(reader.feed(b"data: [DONE]\n\n").events) == 1
    assert stream(chunk(), done=False, streamed=False).events == []
    twice = stream(chunk(), chunk(), streamed=False)
    assert (twice.code, twice.events) == ("backend_protocol_error", [])


def test_an_error_behind_an_opening_that_says_nothing_comes_alone() -> None:
    came = stream(*OPENINGS, err(message="x", type="server_error"))
    assert (came.code, came.events) == ("server_error", [])
    assert stream(*OPENINGS, done=False).events == []


@pytest.mark.parametrize(
    "first",
    [
        chunk("a"),
        chunk(None, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        chunk(None, choices=[{"index": 0, "delta": {"role": "assistant", "audio": {"id": "a"}}}]),
        {"choices": [{"index": 0, "text": ""}]},
    ],
)
def test_an_opening_comes_with_the_first_that_says_something(first: Any) -> None:
    reader = EventReader(order())
    assert reader.feed(b"".join(encode_event(json.dumps(each).encode()) for each in OPENINGS)).events == []
    found = reader.feed(encode_event(json.dumps(first).encode())).events
    assert len(found) == len(OPENINGS) + 1
    assert json.loads(found[-1])["choices"] == first["choices"]


def test_an_opening_is_all_there_may_be_and_waits_for_no_more_than_a_few() -> None:
    came = stream(*OPENINGS)
    assert (came.complete, len(came.events)) == (True, 3)
    assert len(stream(*OPENINGS * 200, done=False).events) > 0


@pytest.mark.parametrize("nothing", [None, "", False, {}, {"message": None, "code": None}, [], 0])
def test_an_error_that_is_none_is_none(nothing: Any) -> None:
    assert stream(chunk(error=nothing)).complete
    whole = json.dumps({"choices": [], "error": nothing}).encode()
    assert read(WholeReader(order(streamed=False)), [whole]).complete


@pytest.mark.parametrize(
    "line",
    [
        b'error: {"code":500,"message":"Compute error.","type":"server_error"}\n\n',
        b'error:{"error":{"code":500,"message":"Compute error."}}\r\n\r\n',
        b'event: error\ndata: {"message":"Compute error.","code":500}\n\n',
        b"event: error\ndata: Compute error.\n\n",
    ],
)
def test_events_named_error_are_errors(line: bytes) -> None:
    wire = encode_event(b'{"choices":[{}]}') + line + b"data: [DONE]\n\n"
    for cut in range(len(wire)):
        came = read(EventReader(order()), [wire[:cut], wire[cut:]])
        assert came.fault is not None
        assert "Compute error." in came.fault.error().body.message
        assert not came.complete


def test_an_error_event_without_an_error_is_one() -> None:
    assert read(EventReader(order()), [b"event: error\ndata: {}\n\n"]).code == "backend_protocol_error"


# Whole answers.


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "backend_protocol_error"),
        (b"null", "backend_protocol_error"),
        (b"[]", "backend_protocol_error"),
        (b"{}", "backend_protocol_error"),
        (b'{"choices":null}', "backend_protocol_error"),
        (b'{"choices":[]', "backend_protocol_error"),
        (b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "backend_protocol_error"),
        (b'{"error":{"message":"x","type":"server_error"}}', "server_error"),
        (b'{"object":"error","message":"x","type":"BadRequestError","code":400}', "BadRequestError"),
        (b'[{"error":{"code":503,"message":"x","status":"UNAVAILABLE"}}]', "backend_error"),
    ],
)
def test_whole_answers_that_are_none(body: bytes, code: str) -> None:
    came = read(WholeReader(order(streamed=False)), [body[:3], body[3:]])
    assert (came.code, came.events, came.complete) == (code, [], False)


def test_half_a_surrogate_pair_is_the_models_own() -> None:
    body = b'{"model":"theirs","choices":[{"message":{"content":"\\ud83d"}}],"usage":{"prompt_tokens":1}}'
    came = read(WholeReader(order(streamed=False)), [body])
    assert came.events == [body.replace(b"theirs", b"m")]
    data = b'{"choices":[{"delta":{"content":"\\ud83d"}}],"model":"theirs","usage":{"completion_tokens":1}}'
    came = stream(data, prompt_tokens=1)
    assert (came.events, came.usage) == ([data.replace(b"theirs", b"m")], TokenUsage(1, 1, source="estimated"))


@pytest.mark.parametrize("strange", ["\ud83d", 10**30, float("nan"), 10**400])
def test_strange_values_survive_being_told_the_other_way(strange: Any) -> None:
    whole = json.dumps({"choices": [{"message": {"content": "a", "new": strange}}]}).encode()
    (event,) = read(WholeReader(order()), [whole]).events
    piece = json.dumps({"choices": [{"index": 0, "delta": {"content": "a", "new": strange}}]}).encode()
    (gathered,) = read(GatheringReader(order(streamed=False)), [encode_event(piece) + b"data: [DONE]\n\n"]).events
    for told, place in ((event, "delta"), (gathered, "message")):
        new = json.loads(told)["choices"][0][place]["new"]
        assert new == strange or strange != strange


def test_a_stream_is_put_together_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end all of it would hold up everybody else."""
    reader = GatheringReader(order(streamed=False))
    for _ in range(50):
        reader.feed(encode_event(json.dumps(chunk("ab")).encode()))
    read_late = 0

    def count(data: bytes) -> Any:
        nonlocal read_late
        read_late += 1
        return decoded(data)

    monkeypatch.setattr("gateway.backends.openai_reshaping.decoded", count)
    (whole,) = reader.feed(b"data: [DONE]\n\n").events
    assert json.loads(whole)["choices"][0]["message"]["content"] == "ab" * 50
    assert read_late == 0


def test_a_whole_answer_without_usage_is_estimated_by_its_text() -> None:
    body = json.dumps({"choices": [{"message": {"content": "x" * 40}}]}).encode()
    came = read(WholeReader(order(streamed=False)), [body])
    assert came.usage == TokenUsage(10, 10, source="estimated")
    embeddings = read(WholeReader(order(streamed=False, api="embeddings")), [b'{"data":[{"embedding":"AAAA"}]}'])
    assert embeddings.usage == TokenUsage(10, 0, source="estimated")
