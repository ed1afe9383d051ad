"""Answers told as Messages: Anthropic's own SDK puts a stream together again, and finds what the whole answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ask import Untranslatable
from gateway.translation.messages_from_chat import MessagesFromChat

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(lambda name, input_: (name, input_), NAME, st.dictionaries(TEXT, VALUE, max_size=3))


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish} | more
    return json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}).encode()


def call_piece(index: int, arguments: str | None = None, **begun: Any) -> dict[str, Any]:
    function = {key: begun.pop(key) for key in ("name",) if key in begun}
    return {"tool_calls": [{"index": index, "function": function | {"arguments": arguments}} | begun]}


def whole(message: dict[str, Any], finish: str | None = "stop", usage: Any = None, **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish} | more
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def events_of(chunks: list[bytes]) -> list[dict[str, Any]]:
    translator = MessagesFromChat("asked")
    found = [event for data in chunks for event in translator.event(data)] + translator.end()
    return [json.loads(event) for event in found]


def in_order(events: list[dict[str, Any]]) -> None:
    """Blocks come one after another, each begun, told and ended."""
    first, *middle, delta, stop = events
    assert (first["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    at, is_open = -1, False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open
            at, is_open = at + 1, True
        else:
            assert is_open
        assert event["index"] == at
        is_open = kind != "stop"
    assert not is_open


def put_together(events: list[dict[str, Any]]) -> Message:
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "message_stop":
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)  # type: ignore[arg-type]
    assert message is not None
    return Message.construct(**message.to_dict())


def comparable(message: Message) -> dict[str, Any]:
    found = json.loads(message.to_json())
    for block in found["content"]:
        block.pop("parsed_output", None)
    return {key: value for key, value in found.items() if value is not None}


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """``text`` in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A whole answer, and the same cut into chunks."""
    thinking, text, refusal = draw(TEXT), draw(TEXT), draw(st.just("") | TEXT)
    calls = draw(st.lists(CALL, max_size=3))
    finish = "tool_calls" if calls else draw(st.sampled_from(["stop", "length", "content_filter", "strange"]))
    cached = draw(st.integers(0, 5))
    usage = {"prompt_tokens": 5 + cached, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    named = draw(st.sampled_from(["reasoning_content", "reasoning"]))
    pieces = [{"role": "assistant", "content": ""}]
    pieces += [{named: piece} for piece in draw(cut(thinking))]
    pieces += [{"content": piece} for piece in draw(cut(text))]
    pieces += [{"refusal": piece} for piece in draw(cut(refusal))]
    lanes = []
    for index, (name, input_) in enumerate(calls):
        arguments = draw(cut(json.dumps(input_)))
        lane = [call_piece(index, arguments[0], id=f"call_{index}", type="function", name=name)]
        lanes.append(lane + [call_piece(index, piece) for piece in arguments[1:]])
    in_turn = draw(st.booleans())
    while lanes:
        # A call begins behind those before it; what follows may come in any turn.
        begun = [lane for lane in lanes if "id" not in lane[0]["tool_calls"][0]]
        ready = [*begun, *(lane for lane in lanes if lane not in begun)][: len(begun) + 1]
        lane = draw(st.sampled_from(ready)) if in_turn else lanes[0]
        pieces.append(lane.pop(0))
        lanes = [lane for lane in lanes if lane]
    chunks = [chunk(piece) for piece in pieces] + [chunk({}, finish)]
    ending = json.dumps({"id": "c", "choices": [], "usage": usage}).encode()
    chunks.append(ending)
    message: dict[str, Any] = {named: thinking, "content": text or None, "refusal": refusal or None}
    message["tool_calls"] = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(input_)}}
        for index, (name, input_) in enumerate(calls)
    ]
    return whole(message, finish, usage), chunks


@given(answers())
@settings(max_examples=100)
def test_a_stream_put_together_is_the_whole_answer(answer: tuple[bytes, list[bytes]]) -> None:
    body, chunks = answer
    events = events_of(chunks)
    in_order(events)
    expected = Message.construct(**json.loads(MessagesFromChat("asked").whole(body)))
    assert comparable(put_together(events)) == comparable(expected)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(
    st.sampled_from(["choices", "delta", "message", "usage", "id", "tool_calls", "function", "name", "arguments",
                     "content", "index", "finish_reason", "prompt_tokens", "refusal", "reasoning"]), v)))  # fmt: skip
@settings(max_examples=100)
def test_wild_answers_are_told_to_be_unreadable(value: Any) -> None:
    for shaped in (
        value,
        {"choices": [{"delta": value, "message": value}]},
        {"choices": [{"delta": {"content": value}}]},
    ):
        data = json.dumps(shaped).encode()
        translator = MessagesFromChat("asked")
        try:
            for event in [*translator.event(data), *translator.event(chunk({}, "stop")), *translator.end()]:
                json.loads(event)
            json.loads(MessagesFromChat("asked").whole(data))
        except Untranslatable as fault:
            assert str(fault)


@pytest.mark.parametrize(
    ("finish", "more", "message", "reason"),
    [
        ("stop", {}, {"content": "a"}, ("end_turn", None)),
        ("stop", {"stop_reason": "\n"}, {"content": "a"}, ("stop_sequence", "\n")),
        ("stop", {"stop_reason": 7}, {"content": "a"}, ("end_turn", None)),
        ("length", {}, {"content": "a"}, ("max_tokens", None)),
        ("content_filter", {}, {"content": "a"}, ("refusal", None)),
        ("stop", {}, {"refusal": "No."}, ("refusal", None)),
        ("tool_calls", {}, {"content": "a"}, ("end_turn", None)),
        ("tool_calls", {}, {"tool_calls": [{"id": "x", "function": {"name": "f"}}]}, ("tool_use", None)),
        ("stop", {}, {"tool_calls": [{"id": "x", "function": {"name": "f"}}]}, ("tool_use", None)),
        ("length", {}, {"tool_calls": [{"id": "x", "function": {"name": "f"}}]}, ("max_tokens", None)),
        ("abort", {}, {"content": "a"}, ("abort", None)),
    ],
)  # fmt: skip
def test_why_an_answer_ended(finish: str, more: Any, message: Any, reason: tuple[str, str | None]) -> None:
    found = json.loads(MessagesFromChat("asked").whole(whole(message, finish, **more)))
    assert (found["stop_reason"], found["stop_sequence"]) == reason
    assert ("stop_details" in found) == (reason[0] == "refusal")
    *_, delta, _stop = events_of([chunk(message), chunk({}, finish, **more)])
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == reason


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (whole({"content": "a"}, None), "does not say why"),
        (b'{"id":"c","choices":[]}', "no choice"),
        (b'{"id":"c"}', "no choice"),
        (b'{"choices":[{"finish_reason":"stop"}]}', "no choice"),
        (b'{"usage":' + b"[" * 100_000, "nested too deeply"),
        (b"nonsense", "is not as"),
        (whole({"tool_calls": [{"id": "x"}]}), "without a name"),
        (whole({"reasoning": 5}), "is not as"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_no_answer_is_not_made_one(data: bytes, said: str) -> None:
    with pytest.raises(Untranslatable, match=said):
        MessagesFromChat("asked").whole(data)


def test_the_end_of_a_stream_is_never_made_up() -> None:
    for chunks, said in (
        ([chunk({"content": "a"})], "does not say why"),
        ([], "no choice"),
        ([b'{"id":"","choices":[],"prompt_filter_results":[]}'], "no choice"),
        ([chunk(call_piece(0, "{}")), chunk({}, "tool_calls")], "without a name"),
    ):
        with pytest.raises(Untranslatable, match=said):
            events_of(chunks)


def test_arguments_that_are_no_object_are_wrapped() -> None:
    for arguments, input_ in (
        ("", {}),
        (" ", {}),
        ('{"a": 1.10}', {"a": 1.1}),
        ('{"a"', {"INVALID_JSON": '{"a"'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
    ):
        calls = [{"id": "x", "function": {"name": "f", "arguments": arguments}}]
        body = MessagesFromChat("asked").whole(whole({"tool_calls": calls}, "tool_calls"))
        assert json.loads(body)["content"][0]["input"] == input_


def test_calls_without_ids_and_calls_that_all_have_the_index_0() -> None:
    both = [call_piece(0, '{"a":1}', id="x", name="f"), call_piece(0, '{"a":2}', id="y", name="f")]
    message = put_together(events_of([*map(chunk, both), chunk({}, "tool_calls")]))
    assert [(block.id, block.input) for block in message.content] == [("x", {"a": 1}), ("y", {"a": 2})]  # type: ignore[union-attr]
    unnamed = [call_piece(0, "{}", name="f"), call_piece(1, "{}", name="f")]
    message = put_together(events_of([*map(chunk, unnamed), chunk({}, "tool_calls")]))
    ids = {block.id for block in message.content}  # type: ignore[union-attr]
    assert len(ids) == 2
    assert all(id.startswith("toolu_") for id in ids)


def test_usage_that_is_told_early_late_or_never() -> None:
    early = json.dumps({"id": "c", "choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 7}}).encode()
    first, *_, delta, _ = events_of([early, chunk({}, "stop")])
    assert first["message"]["usage"]["input_tokens"] == delta["usage"]["input_tokens"] == 7
    *_, delta, _ = events_of([chunk({"content": "a"}, "stop")])
    assert delta["usage"]["output_tokens"] == 0
    other = json.dumps({"id": "c", "choices": [{"index": 1, "delta": {"content": "never"}}]}).encode()
    assert "never" not in json.dumps(events_of([other, chunk({"content": "a"}, "stop")]))


def test_calls_are_told_as_they_come_and_wait_only_for_one_that_is_not_complete() -> None:
    def told(translator: MessagesFromChat, piece: dict[str, Any]) -> list[tuple[str, int]]:
        events = [json.loads(event) for event in translator.event(chunk(piece))]
        return [(event["type"].removeprefix("content_block_"), event["index"]) for event in events if "index" in event]

    translator = MessagesFromChat("asked")
    assert told(translator, call_piece(0, "", id="x", name="f")) == [("start", 0)]
    assert told(translator, call_piece(0, '{"a":')) == [("delta", 0)]
    assert told(translator, call_piece(1, '{"b":', id="y", name="f")) == []
    assert told(translator, {"content": "so"}) == []
    assert told(translator, call_piece(1, "2}")) == []
    begun = [("start", 1), ("delta", 1), ("stop", 1), ("start", 2), ("delta", 2)]
    assert told(translator, call_piece(0, "1} ")) == [("delta", 0), ("stop", 0), *begun]
    assert told(translator, call_piece(2, "{}", id="z", name="f")) == [("stop", 2), ("start", 3), ("delta", 3)]
