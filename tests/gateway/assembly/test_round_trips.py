"""A whole answer told as a stream, and put together again, is the answer; and so is as much as came of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis import Api
from gateway.assembly import assembler, describe, replay
from gateway.billing.usage import TokenUsage
from tests.gateway.assembly.answers import ANSWERS, VALUES, chat_completions, completions, messages, responses

PLENTY = 10**7
FEWER = settings(max_examples=50)
API_ANSWERS = st.one_of(*(st.tuples(st.just(api), answers) for api, answers in ANSWERS.items()))
EVENT_FIELDS = (
    *("type", "choices", "delta", "index", "message", "content", "tool_calls", "function", "arguments", "logprobs"),
    *("content_block", "text", "usage", "response", "output", "item", "part", "output_index", "content_index", "id"),
)
KINDS = (
    *("message_start", "content_block_start", "content_block_delta", "message_delta", "response.created"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.completed"),
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(EVENT_FIELDS), inner, max_size=5),
    max_leaves=20,
)


def together(api: Api, events: list[bytes], *, limit: int = PLENTY, usage: TokenUsage | None = None) -> Any:
    found = assembler(api, limit=limit)
    for event in events:
        found.feed(event)
    whole = found.whole(usage)
    assert whole == found.whole(usage)
    return None if whole is None else json.loads(whole)


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@FEWER
@given(answer=chat_completions())
def test_a_chat_completion_comes_back(answer: dict[str, Any]) -> None:
    events = replay("chat_completions", encoded(answer), include_usage=True)
    assert together("chat_completions", events) == answer
    tells_usage_once("chat_completions", answer)
    chunks = [json.loads(event) for event in events]
    for index in range(len(answer["choices"])):
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert not any("role" in delta for delta in deltas[1:])


@FEWER
@given(answer=completions())
def test_a_completion_comes_back(answer: dict[str, Any]) -> None:
    assert together("completions", replay("completions", encoded(answer), include_usage=True)) == answer
    tells_usage_once("completions", answer)


@FEWER
@given(answer=messages())
def test_a_message_comes_back(answer: dict[str, Any]) -> None:
    assert together("messages", replay("messages", encoded(answer), include_usage=False)) == answer


@FEWER
@given(answer=responses())
def test_a_response_comes_back_also_without_the_event_that_bears_it_whole(answer: dict[str, Any]) -> None:
    events = replay("responses", encoded(answer), include_usage=False)
    assert together("responses", events) == answer
    before = together("responses", events[:-1])
    assert before["output"] == answer["output"]
    assert before["status"] == "in_progress"
    # Nor is any of it told by the items' own last events alone.
    told = [event for event in events[:-1] if b".done" not in event]
    texts = [part.get("text", part.get("refusal")) for item in answer["output"] for part in item.get("content", ())]
    unfinished = together("responses", told)
    assert texts == [
        part.get("text", part.get("refusal")) for item in unfinished["output"] for part in item.get("content", ())
    ]


def tells_usage_once(api: Api, answer: dict[str, Any]) -> None:
    """Behind all choices, and only if asked for."""
    asked = [json.loads(event) for event in replay(api, encoded(answer), include_usage=True)]
    assert [chunk for chunk in asked if chunk.get("usage") is not None or not chunk["choices"]] == asked[-1:]
    assert (asked[-1]["choices"], asked[-1]["usage"]) == ([], answer["usage"])
    not_asked = [json.loads(event) for event in replay(api, encoded(answer), include_usage=False)]
    assert not_asked == asked[:-1]


@FEWER
@given(api_answer=API_ANSWERS, cut=st.integers(0, 30))
def test_as_much_as_came_is_a_part_of_the_answer(api_answer: tuple[Api, dict[str, Any]], cut: int) -> None:
    api, answer = api_answer
    events = replay(api, encoded(answer), include_usage=True)
    part = together(api, events[:cut])
    if cut == 0:
        assert part is None
        return
    assert part["id"] == answer["id"]
    facts, whole = describe(api, encoded(part)), describe(api, encoded(answer))
    if cut < len(events) - 2 and api in ("messages", "responses"):
        assert not facts.complete
    for said in facts.text.split("\n"):
        assert said in whole.text


@FEWER
@given(api_answer=API_ANSWERS, limit=st.integers(0, 400))
def test_what_is_over_the_limit_is_cut_and_said_to_be(api_answer: tuple[Api, dict[str, Any]], limit: int) -> None:
    api, answer = api_answer
    found = assembler(api, limit=limit)
    for event in replay(api, encoded(answer), include_usage=True):
        found.feed(event)
    whole = found.whole(None)
    text, kept = describe(api, encoded(answer)).text, describe(api, whole or b"").text
    assert len(kept.replace("\n", "").encode()) <= limit
    if len(text.replace("\n", "").encode()) > limit:
        assert found.over
    if not found.over:
        assert whole is not None
        assert json.loads(whole) == answer


@FEWER
@given(api=st.sampled_from(list(ANSWERS)), events=st.lists(ODD | VALUES, max_size=6), cut=st.integers(0, 200))
def test_odd_events_are_passed_over(api: Api, events: list[Any], cut: int) -> None:
    told = [encoded(event) for event in events]
    together(api, [event[: len(event) - cut] if at % 2 else event for at, event in enumerate(told)])
    for event in told:
        describe(api, event)
        together(api, replay(api, event, include_usage=True))


@pytest.mark.parametrize("api", list(ANSWERS))
@pytest.mark.parametrize("event", [b"", b"\xff", b"[" * 100_000, b'{"type":' * 100_000, b'{"choices":[{"delta":NaN}]}'])
def test_what_is_no_json_is_passed_over(api: Api, event: bytes) -> None:
    assert replay(api, event[:9], include_usage=True) == []
    together(api, [event])
    assert not describe(api, event).complete
