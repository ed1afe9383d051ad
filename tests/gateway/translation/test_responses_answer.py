"""Chat completions' answers as responses: whole and streamed alike, however the stream is cut."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from gateway.ask import Untranslatable
from gateway.translation.responses_answer import EVENT_PREFIX, Frame, ResponsesAnswer

HEX = "0" * 31 + "7"


def answer(**echo: Any) -> ResponsesAnswer:
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in echo.items()}
    return ResponsesAnswer(Frame(HEX, "asked", 100, raw), lambda: 102)


def completion(message: dict[str, Any], finish: str | None = "stop", **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]} | more).encode()


def chunk(delta: dict[str, Any], finish: str | None = None, **choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | choice]}).encode()


def whole(body: bytes) -> dict[str, Any]:
    response: dict[str, Any] = json.loads(answer().whole(body))
    return response


def streamed(*chunks: bytes) -> list[dict[str, Any]]:
    """The events, each checked for what all have in common."""
    translator = answer()
    data = [event for each in chunks for event in translator.event(each)] + translator.end()
    events = [json.loads(event) for event in data]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for raw, event in zip(data, events, strict=True):
        assert raw.startswith(EVENT_PREFIX + event["type"].encode() + b'"')
    assert events[-1]["response"]["id"] == f"resp_{HEX}"
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What OpenAI's SDK makes of the events that come before the last, and of it."""
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    snapshot: Any = None
    for event in events:
        typed: Any = construct_type(type_=ResponseStreamEvent, value=event)
        state.handle_event(typed)
        if event["type"] == "response.output_item.done":
            snapshot = {**(snapshot or {}), event["output_index"]: event["item"]}
    final = events[-1]["response"]
    assert [snapshot[index] for index in sorted(snapshot)] == final["output"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert Response.model_validate(final).output_text == said
    return dict(final)


def test_the_events_of_text_with_logprobs() -> None:
    one = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    two = one | {"token": "b"}
    events = streamed(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "a"}, logprobs={"content": [one]}),
        chunk({"content": ""}, logprobs={"content": [two]}),
        chunk({"content": "b"}),
        chunk({}, "stop"),
    )
    place = {"item_id": f"msg_{HEX}0000", "output_index": 0, "content_index": 0}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [("a", [one]), ("b", [two])]
    assert all(event.items() >= place.items() for event in deltas)
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert (done["text"], done["logprobs"]) == ("ab", [one, two])
    part = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": [one, two]}
    assert events[-1]["response"]["output"][0]["content"] == [part]
    assert accumulated(events)["completed_at"] == 102


def test_a_refusal_stands_beside_the_text() -> None:
    events = streamed(chunk({"content": "Well, "}), chunk({"refusal": "I "}), chunk({"refusal": "won't."}, "stop"))
    (message,) = events[-1]["response"]["output"]
    assert [part["type"] for part in message["content"]] == ["output_text", "refusal"]
    assert message["content"][1] == {"type": "refusal", "refusal": "I won't."}
    assert [event["type"].removeprefix("response.") for event in events if "refusal" in event["type"]] == [
        *("refusal.delta", "refusal.delta", "refusal.done"),
    ]
    assert whole(completion({"content": "Well, ", "refusal": "I won't."}))["output"] == [message]
    accumulated(events)


def test_a_text_ends_before_what_follows_it_begins_and_calls_end_last() -> None:
    def call(index: int, **function: str) -> bytes:
        return chunk({"tool_calls": [{"index": index, "function": function}]})

    events = streamed(
        chunk({"reasoning": "Hm"}),
        chunk({"content": "Well"}),
        call(0, name="f", arguments="{"),
        call(1, name="g", arguments="{"),
        call(0, arguments="}"),
        call(1, arguments="}"),
        chunk({}, "tool_calls"),
    )
    assert [
        (event["type"].removeprefix("response."), event["output_index"]) for event in events if "output_index" in event
    ] == [
        *(("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0)),
        *(("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0)),
        *(("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1)),
        *(("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1)),
        *(("output_item.added", 2), ("function_call_arguments.delta", 2)),
        *(("output_item.added", 3), ("function_call_arguments.delta", 3)),
        *(("function_call_arguments.delta", 2), ("function_call_arguments.delta", 3)),
        *(("function_call_arguments.done", 2), ("output_item.done", 2)),
        *(("function_call_arguments.done", 3), ("output_item.done", 3)),
    ]
    cut = streamed(chunk({"reasoning": "Hm"}), chunk({"content": "Well"}), chunk({}, "length"))[-1]
    assert [item["status"] for item in cut["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("finish", "status", "reason", "item"),
    [
        ("stop", "completed", None, "completed"),
        ("tool_calls", "completed", None, "completed"),
        ("function_call", "completed", None, "completed"),
        ("length", "incomplete", "max_output_tokens", "incomplete"),
        ("content_filter", "incomplete", "content_filter", "incomplete"),
        ("abort", "incomplete", "abort", "incomplete"),
    ],
)
def test_how_an_answer_ended(finish: str | None, status: str, reason: str | None, item: str) -> None:
    last = streamed(chunk({"content": "a"}), chunk({}, finish))[-1]
    assert last["type"] == f"response.{status}"
    for response in (last["response"], whole(completion({"content": "a"}, finish))):
        assert response["status"] == status
        assert (response["incomplete_details"] or {}).get("reason") == reason
        assert response["output"][0]["status"] == item


def test_no_end_is_made_up() -> None:
    with pytest.raises(Untranslatable, match="does not say why it ended"):
        streamed(chunk({"content": "a"}))
    with pytest.raises(Untranslatable, match="does not say why it ended"):
        whole(completion({"content": "a"}, None))


def test_calls_of_servers_that_word_them_in_their_own_way() -> None:
    def calls(*chunks: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        pieces = [chunk({"tool_calls": each}) for each in chunks]
        output = streamed(*pieces, chunk({}, "tool_calls"))[-1]["response"]["output"]
        return [(item["call_id"], item["name"], item["arguments"]) for item in output]

    first = {"id": "a", "function": {"name": "f", "arguments": '{"x":'}}
    no_index = [[first], [{"function": {"arguments": "1}"}}], [{"id": "b", "function": {"name": "g"}}]]
    assert calls(*no_index) == [("a", "f", '{"x":1}'), ("b", "g", "")]
    as_object = [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]]
    assert calls(*as_object) == [("a", "f", '{"x":1}')]
    assert calls([{"index": 3, "function": {"name": "f"}}]) == [(f"call_{HEX}0000", "f", "")]
    older = whole(completion({"content": None, "function_call": {"name": "f", "arguments": "{}"}}))
    assert older["output"][0]["name"] == "f"


def test_what_the_response_repeats() -> None:
    body = completion({"content": "a"}, service_tier="flex", usage={"prompt_tokens": 3, "completion_tokens": "x"})
    echo = {"tools": [{"type": "function", "name": "f"}], "temperature": 0, "store": False}
    response = json.loads(answer(**echo).whole(body))
    assert response.items() >= (echo | {"model": "asked", "created_at": 100, "service_tier": "flex"}).items()
    assert response["text"] == {"format": {"type": "text"}}
    assert (response["tool_choice"], response["previous_response_id"]) == ("auto", None)
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 3,
    }
    assert whole(completion({"content": "a"}))["usage"] is None
    Response.model_validate(response)


def test_an_empty_answer_is_an_empty_message() -> None:
    (message,) = whole(completion({"content": None}))["output"]
    assert message["content"][0]["text"] == ""
    accumulated(streamed(chunk({"role": "assistant"}), chunk({}, "stop")))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"5", b"[]", b"{", b'{"choices":[]}', b'{"choices":null}', b"[" * 50_000),
        b'{"choices":[{"delta":{"content":5}}]}',
        b'{"choices":[{"delta":{"content":"\\ud800"}}]}',
        b'{"choices":[{"index":1,"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}',
    ],
)
def test_what_is_no_chat_completion_is_told_so(data: bytes) -> None:
    def read() -> None:
        translator = answer()
        translator.event(data)
        translator.end()

    with pytest.raises(Untranslatable):
        read()
    with pytest.raises(Untranslatable):
        answer().whole(data)


words = st.text(min_size=1, max_size=6)
pieces = st.lists(words, max_size=4)


@given(
    thought=pieces,
    content=pieces,
    refusal=pieces,
    calls=st.lists(st.tuples(words, pieces), max_size=3),
    finish=st.sampled_from(["stop", "length", "tool_calls"]),
    together=st.booleans(),
)
def test_a_stream_cut_anyhow_is_the_whole(
    thought: list[str],
    content: list[str],
    refusal: list[str],
    calls: list[tuple[str, list[str]]],
    finish: str,
    together: bool,
) -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for field, texts in (("reasoning_content", thought), ("content", content), ("refusal", refusal)):
        deltas += [{field: text} for text in texts]
    named: list[dict[str, Any]] = [
        {"index": index, "id": f"c{index}", "function": {"name": name}} for index, (name, _) in enumerate(calls)
    ]
    deltas += [{"tool_calls": named}] if together and named else [{"tool_calls": [call]} for call in named]
    # The pieces of the calls take turns.
    rounds = max((len(arguments) for _, arguments in calls), default=0)
    for number in range(rounds):
        for index, (_, arguments) in enumerate(calls):
            if number < len(arguments):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[number]}}]})
    message = {
        "reasoning_content": "".join(thought) or None,
        "content": "".join(content) or None,
        "refusal": "".join(refusal) or None,
        "tool_calls": [
            {"id": f"c{index}", "function": {"name": name, "arguments": "".join(arguments)}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }
    events = streamed(*map(chunk, deltas), chunk({}, finish))
    final = events[-1]["response"]
    assert final == whole(completion(message, finish))
    if finish != "length":
        accumulated(events)


FIELDS = ["choices", "delta", "message", "content", "tool_calls", "function", "name", "arguments", "index", "usage"]
FIELDS += ["finish_reason", "logprobs", "refusal", "reasoning"]
wild_chunks = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=15,
)


@given(wild_chunks)
def test_any_chunk_is_events_or_untranslatable(wild: Any) -> None:
    translator = answer()
    for data in (wild, {"choices": [wild]}, {"choices": [{"delta": wild}]}):
        try:
            translator.event(json.dumps(data).encode())
        except Untranslatable as fault:
            assert str(fault)


def test_calls_that_share_an_index_are_told_apart_by_their_ids() -> None:
    def call(id: str | None, name: str | None, arguments: str) -> bytes:
        return chunk({"tool_calls": [{"index": 0, "id": id, "function": {"name": name, "arguments": arguments}}]})

    pieces = [call("a", "f", '{"x":'), call(None, None, "1}"), call("b", "f", "{}"), call("b", "f", "")]
    output = streamed(*pieces, chunk({}, "tool_calls"))[-1]["response"]["output"]
    assert [(item["call_id"], item["arguments"]) for item in output] == [("a", '{"x":1}'), ("b", "{}")]
    by_id = [chunk({"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": each}}]}) for each in ("{", "}")]
    assert streamed(*by_id, chunk({}, "tool_calls"))[-1]["response"]["output"][0]["arguments"] == "{}"
    first, second = ({"id": id, "function": {"name": "f"}} for id in "ab")
    mixed = chunk({"tool_calls": [first | {"index": 3}, second]})
    assert len(streamed(mixed, chunk({}, "tool_calls"))[-1]["response"]["output"]) == 2
    nothing = streamed(chunk({"content": "a", "tool_calls": [{"function": {"name": "f"}}]}), chunk({}, "stop"))
    assert nothing[-1]["response"]["output"][1]["name"] == "f"
