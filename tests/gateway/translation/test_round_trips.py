"""What goes to Anthropic's words and comes back says the same: requests through both ways, and answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.ask import Body
from gateway.translation.chat_answer import ChatAnswer
from gateway.translation.chat_from_messages import chat_from_messages
from gateway.translation.messages_from_chat import MessagesFromChat
from gateway.translation.messages_request import messages_request
from tests.standins.anthropic_checks import problem
from tests.standins.anthropic_words import encoded, events_of, message

WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=6)
INPUTS = st.dictionaries(WORDS, st.integers() | WORDS | st.lists(st.booleans(), max_size=2), max_size=2)
CALLS = st.lists(st.tuples(WORDS, INPUTS), max_size=2)
TURNS = st.lists(st.tuples(WORDS, WORDS, CALLS), min_size=1, max_size=3)


def conversation(turns: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]) -> list[dict[str, Any]]:
    """A question, an answer, calls and their results, for each of ``turns``; and a last question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for at, (question, answer, calls) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        said: dict[str, Any] = {"role": "assistant", "content": answer}
        if calls:
            said["tool_calls"] = [
                {
                    "id": f"call_{at}_{number}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(given_, ensure_ascii=False)},
                }
                for number, (name, given_) in enumerate(calls)
            ]
        messages.append(said)
        messages += [
            {"role": "tool", "tool_call_id": f"call_{at}_{number}", "content": f"result {number}"}
            for number in range(len(calls))
        ]
    return [*messages, {"role": "user", "content": "And now?"}]


@given(turns=TURNS)
def test_a_conversation_comes_back_as_it_was(turns: list[Any]) -> None:
    chat = {"model": "m", "messages": conversation(turns)}
    sent = messages_request(
        msgspec.json.decode(json.dumps(chat), type=Body), model="claude-sonnet-4-6", max_tokens=9, stream=False
    )
    assert problem(json.loads(sent)) is None
    back = chat_from_messages(msgspec.json.decode(sent, type=Body))
    assert json.loads(bytes(back["messages"])) == chat["messages"]


@given(thought=WORDS | st.none(), text=WORDS, calls=st.lists(st.tuples(WORDS, INPUTS), max_size=3))
def test_an_answer_comes_back_as_it_was(thought: str | None, text: str, calls: list[Any]) -> None:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if thought is not None:
        content.insert(0, {"type": "thinking", "thinking": thought, "signature": ""})
    content += [
        {"type": "tool_use", "id": f"toolu_{at}", "name": name, "input": given_}
        for at, (name, given_) in enumerate(calls)
    ]
    answer = message(*content, stop_reason="tool_use" if calls else "end_turn")
    back = json.loads(MessagesFromChat("m").whole(ChatAnswer("m", 1).whole(encoded(answer))))
    assert back["content"] == content
    assert back["stop_reason"] == answer["stop_reason"]
    for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"):
        assert back["usage"][name] == answer["usage"][name]

    there, and_back = ChatAnswer("m", 1, include_usage=True), MessagesFromChat("m")
    chunks = [chunk for event in events_of(answer) for chunk in there.event(encoded(event))] + there.end()
    events = [json.loads(event) for chunk in chunks for event in and_back.event(chunk)]
    events += [json.loads(event) for event in and_back.end()]
    kinds = [(event["type"], event.get("index")) for event in events]
    sent = [event for event in events_of(answer) if event["type"] != "ping"]
    assert [kind for kind in kinds if kind[0] != "content_block_delta"] == [
        (event["type"], event.get("index")) for event in sent if event["type"] != "content_block_delta"
    ]
    assert events[-2]["delta"]["stop_reason"] == answer["stop_reason"]
