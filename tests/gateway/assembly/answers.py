"""Whole answers of each API, generated."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXTS = st.builds(lambda word, times: word * times, WORDS, st.sampled_from([1, 1, 3, 40]))
SOME = TEXTS.filter(bool)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS.filter(lambda name: name != "index"), inner, max_size=3)
    ),
    max_leaves=6,
)
INPUTS = st.dictionaries(WORDS, VALUES, max_size=3)
USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}


@st.composite
def logprobs(draw: st.DrawFn, text: str) -> Json | None:
    """Of its tokens, or of others: some servers tell a token's bytes in its place."""
    if not draw(st.booleans()):
        return None
    size = draw(st.integers(1, 5))
    words = [text[at : at + size] for at in range(0, len(text), size)]
    if draw(st.booleans()):
        words = [f"bytes:{word.encode().hex()}" for word in words]
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    told = [{"token": word, "logprob": -0.25, "bytes": list(word.encode()), "top_logprobs": top} for word in words]
    return {"content": told, "refusal": None}


@st.composite
def tool_calls(draw: st.DrawFn) -> list[Json]:
    calls = draw(st.lists(st.tuples(SOME, st.builds(json.dumps, INPUTS) | TEXTS), max_size=3))
    return [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]


@st.composite
def chat_completions(draw: st.DrawFn) -> Json:
    return {
        "id": draw(SOME),
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [draw(_choice(index)) for index in range(draw(st.integers(1, 3)))],
        "usage": USAGE,
    } | draw(
        st.fixed_dictionaries({}, optional={"system_fingerprint": WORDS | st.none(), "citations": st.lists(WORDS)})
    )


@st.composite
def _choice(draw: st.DrawFn, index: int) -> Json:
    content = draw(TEXTS | st.none())
    message: Json = {"role": "assistant", "content": content} | draw(
        st.fixed_dictionaries(
            {},
            optional={
                "refusal": TEXTS | st.none(),
                "reasoning_content": TEXTS | st.none(),
                "tool_calls": tool_calls() | st.none(),
                "function_call": st.none() | st.fixed_dictionaries({"name": SOME, "arguments": TEXTS}),
                "annotations": st.lists(st.fixed_dictionaries({"type": SOME, "url_citation": INPUTS}), max_size=2),
                "audio": st.none()
                | st.fixed_dictionaries({"id": SOME, "data": TEXTS, "expires_at": st.integers(0, 9)}),
                "their_own": VALUES,
            },
        )
    )
    more = draw(st.fixed_dictionaries({}, optional={"stop_reason": st.none() | st.integers(0, 9) | WORDS}))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter", "eos"]))
    if draw(st.booleans()):
        more["logprobs"] = draw(logprobs(content or ""))
    return {"index": index, "message": message, "finish_reason": finish} | more


@st.composite
def completions(draw: st.DrawFn) -> Json:
    choices = []
    for index in range(draw(st.integers(1, 3))):
        text = draw(TEXTS)
        told = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0]}
        choice = {"index": index, "text": text, "logprobs": draw(st.sampled_from([None, told]))}
        choices.append(choice | {"finish_reason": draw(st.sampled_from(["stop", "length"]))})
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": "m"}
    return head | {"choices": choices, "usage": USAGE}


TEXT_BLOCKS = st.fixed_dictionaries(
    {"type": st.just("text"), "text": TEXTS},
    optional={
        "citations": st.none() | st.lists(st.fixed_dictionaries({"type": SOME, "cited_text": WORDS}), max_size=2)
    },
)
BLOCKS = st.one_of(
    TEXT_BLOCKS,
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXTS, "signature": WORDS}),
    st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": WORDS}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": SOME, "name": SOME, "input": INPUTS}),
    st.fixed_dictionaries({"type": st.just("server_tool_use"), "id": SOME, "name": SOME, "input": INPUTS}),
    st.fixed_dictionaries({"type": st.just("web_search_tool_result"), "tool_use_id": SOME, "content": VALUES}),
)


@st.composite
def messages(draw: st.DrawFn) -> Json:
    reason = draw(st.sampled_from(["end_turn", "max_tokens", "tool_use", "stop_sequence", "refusal"]))
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": draw(st.lists(BLOCKS, max_size=4)),
        "stop_reason": reason,
        "stop_sequence": draw(SOME) if reason == "stop_sequence" else None,
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": draw(st.integers(0, 9))},
    } | draw(st.fixed_dictionaries({}, optional={"stop_details": INPUTS, "context_management": INPUTS}))


@st.composite
def responses(draw: st.DrawFn) -> Json:
    status = draw(st.sampled_from(["completed", "incomplete"]))
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": status,
        "completed_at": 1_700_000_001 if status == "completed" else None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": "m",
        "output": [draw(_item(at)) for at in range(draw(st.integers(0, 3)))],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 7,
        },
    }


@st.composite
def _item(draw: st.DrawFn, at: int) -> Json:
    kind, base = (
        draw(st.sampled_from(["message", "reasoning", "function_call"])),
        {"id": f"item_{at}", "status": "completed"},
    )
    if kind == "function_call":
        called = {"type": kind, "call_id": f"call_{at}", "name": draw(SOME), "arguments": json.dumps(draw(INPUTS))}
        return base | called
    if kind == "reasoning":
        summary = [{"type": "summary_text", "text": text} for text in draw(st.lists(TEXTS, max_size=2))]
        content = [{"type": "reasoning_text", "text": text} for text in draw(st.lists(TEXTS, max_size=2))]
        return base | {"type": kind, "summary": summary, "content": content}
    parts: list[Json] = []
    for text in draw(st.lists(TEXTS, min_size=1, max_size=2)):
        told = draw(logprobs(text)) if text else None
        cited = [{"type": "url_citation", "url": "https://x", "title": "X", "start_index": 0, "end_index": 1}]
        annotations = draw(st.sampled_from([[], cited]))
        probable = told["content"] if told else []
        parts.append({"type": "output_text", "text": text, "annotations": annotations, "logprobs": probable})
    if draw(st.booleans()):
        parts.append({"type": "refusal", "refusal": draw(TEXTS)})
    return base | {"type": kind, "role": "assistant", "content": parts}


ANSWERS = {"chat_completions": chat_completions(), "completions": completions()}
ANSWERS |= {"messages": messages(), "responses": responses()}
