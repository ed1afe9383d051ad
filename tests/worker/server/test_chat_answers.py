"""What chats can ask for beside text: several choices, log-probabilities, why it stopped, calls of tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.worker.server.asking import BODY, MODEL, TEXT, USER, error_of, frames, http, sdk, until
from tests.worker.server.conftest import StartScripted
from worker.protocol.sse import Event
from worker.server.tokenizer import Tokenizer

HERMES = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("weather", "time")
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def joined(chunks: list[ChatCompletionChunk]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as a client does it, by their indexes."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index, {"role": [], "content": "", "calls": {}, "logprobs": [], "reasons": [], "stop": []}
            )
            delta = part.delta
            choice["role"] += [delta.role] if delta.role else []
            choice["content"] += delta.content or ""
            choice["logprobs"] += part.logprobs.content or [] if part.logprobs else []
            choice["reasons"] += [part.finish_reason] if part.finish_reason else []
            choice["stop"] += [part.to_dict()["stop_reason"]] if "stop_reason" in part.to_dict() else []
            for call in delta.tool_calls or []:
                assert call.function is not None
                kept = choice["calls"].setdefault(call.index, {"id": [], "name": [], "arguments": ""})
                kept["id"] += [call.id] if call.id else []
                kept["name"] += [call.function.name] if call.function.name else []
                kept["arguments"] += call.function.arguments or ""
    return choices


def whole(answer: ChatCompletion) -> dict[int, dict[str, Any]]:
    """The same of a whole answer."""
    return {
        choice.index: {
            "role": [choice.message.role],
            "content": choice.message.content or "",
            "calls": {
                at: {"id": [call.id], "name": [call.function.name], "arguments": call.function.arguments}  # type: ignore[union-attr]
                for at, call in enumerate(choice.message.tool_calls or [])
            },
            "logprobs": (choice.logprobs.content or []) if choice.logprobs else [],
            "reasons": [choice.finish_reason],
            "stop": [choice.to_dict()["stop_reason"]],
        }
        for choice in answer.choices
    }


async def both(client: Any, **request: Any) -> tuple[dict[int, dict[str, Any]], ChatCompletion]:
    """A request's whole answer, its choices equal to those of the stream; but for the ids of calls, which are new."""
    answer = await client.chat.completions.create(**BODY | request)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat.completions.create(**BODY | options | request)]
    usage = chunks.pop()
    assert usage.choices == []
    assert usage.usage.completion_tokens == answer.usage.completion_tokens
    assert usage.usage.prompt_tokens == answer.usage.prompt_tokens
    found, streamed = whole(answer), joined(chunks)
    for choices in (found, streamed):
        ids = [call.pop("id") for choice in choices.values() for call in choice["calls"].values()]
        assert all(len(some) == 1 and some[0] for some in ids)
        assert len({some[0] for some in ids}) == len(ids)
    assert streamed == found
    return found, answer


async def test_several_choices(scripted: StartScripted, tokenizer: Tokenizer) -> None:
    server = await scripted(TEXT, max_running=4, max_waiting=1)
    count = len(tokenizer.encode(TEXT)) + 1
    async with sdk(server) as client:
        found, answer = await both(client, n=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3 * count
        assert answer.usage.prompt_tokens == 31
        assert answer.usage.total_tokens == 31 + 3 * count
        assert sorted(found) == [0, 1, 2]
        assert all(choice["content"] == TEXT and choice["reasons"] == ["stop"] for choice in found.values())
        found, answer = await both(client, n=2, stop=["wör"], max_tokens=50)
        assert [choice["content"] for choice in found.values()] == ["Hello, ", "Hello, "]
        await until(lambda: server.engine.open_requests == 0)
        with pytest.raises(BadRequestError, match="makes 6 sequences"):
            await client.chat.completions.create(**BODY, n=6)


async def test_choices_that_find_no_place_leave_none_behind(scripted: StartScripted) -> None:
    server = await scripted("word " * 60, step_s=0.02, max_running=2, max_waiting=2)
    async with sdk(server) as client:
        first = asyncio.ensure_future(client.chat.completions.create(**BODY, n=2))
        await until(lambda: server.engine.open_requests == 2)
        with pytest.raises(InternalServerError) as refused:
            await client.chat.completions.create(**BODY, n=3)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_overloaded")
        assert refused.value.response.headers["retry-after"] == "1"
        await until(lambda: server.engine.open_requests == 2)
        assert len((await first).choices) == 2


async def test_a_choice_that_fails_fails_the_answer(scripted: StartScripted) -> None:
    """The second waits too long behind the first."""
    server = await scripted("word " * 200, step_s=0.02, max_running=1, queue_timeout_s=0.3)
    async with http(server) as client:
        whole = await client.post("/v1/chat/completions", json=BODY | {"n": 2})
        assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
        assert error_of(whole.content)["code"] == "engine_overloaded"
        await until(lambda: server.engine.open_requests == 0)
        cut = await client.post("/v1/chat/completions", json=BODY | {"n": 2, "stream": True})
        assert cut.status_code == 200
        events = [frame.data for frame in frames(cut.content) if isinstance(frame, Event)]
        assert error_of(events[-1])["code"] == "engine_overloaded"
        assert not any(event == b"[DONE]" or b'"finish_reason":"' in event for event in events)
        await until(lambda: server.engine.open_requests == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_stops_every_choice(scripted: StartScripted, stream: bool) -> None:
    server = await scripted("word " * 200, step_s=0.05)
    async with http(server) as client:
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | {"n": 4, "stream": stream}))
        await until(lambda: server.engine.stats.running == 4)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert await until(lambda: server.engine.open_requests == 0) < 1.0


async def test_log_probabilities(scripted: StartScripted) -> None:
    server = await scripted(TEXT)
    async with sdk(server) as client:
        for top in (None, 0, 5):
            found, _ = await both(client, logprobs=True, **{} if top is None else {"top_logprobs": top})
            tokens = found[0]["logprobs"]
            assert bytes(byte for token in tokens for byte in token.bytes).decode() == TEXT == found[0]["content"]
            assert all(token.logprob == -0.25 and len(token.top_logprobs) == (top or 0) for token in tokens)
            assert all(bytes(token.bytes).decode(errors="replace") == token.token for token in tokens)
            assert not top or tokens[0].top_logprobs[0].token == tokens[0].token
        # What is not shown has none: neither the stop token nor what a stop string takes away.
        found, _ = await both(client, logprobs=True, stop="rld")
        assert found[0]["content"] == "Hello, wö"
        shown = bytes(byte for token in found[0]["logprobs"] for byte in token.bytes).decode()
        assert shown == "Hello, wör"  # one token spells the two last letters
        found, _ = await both(client, logprobs=True, stop="ello")
        assert [token.token for token in found[0]["logprobs"]] == ["Hello"]
        found, _ = await both(client, logprobs=True, stop="Hello")
        assert found[0]["logprobs"] == []
        found, _ = await both(client)
        assert found[0]["logprobs"] == []


async def test_why_it_stopped(scripted: StartScripted, tokenizer: Tokenizer) -> None:
    server = await scripted("one two three four")
    (three,) = tokenizer.encode(" three")
    async with sdk(server) as client:

        async def ask(**more: Any) -> tuple[str, str, Any]:
            found, _ = await both(client, extra_body=more)
            return found[0]["content"], found[0]["reasons"][0], found[0]["stop"][0]

        assert await ask() == ("one two three four", "stop", None)
        assert await ask(max_tokens=2) == ("one two", "length", None)
        assert await ask(stop=["x", " tw"]) == ("one", "stop", " tw")
        assert await ask(stop=["x", " tw"], include_stop_str_in_output=True) == ("one tw", "stop", " tw")
        assert await ask(stop_token_ids=[three, 5]) == ("one two", "stop", three)
        assert await ask(stop_token_ids=[three], include_stop_str_in_output=True) == ("one two three", "stop", three)
        assert await ask(stop=["two"], min_tokens=3) == ("one two three four", "stop", None)
        assert await ask(skip_special_tokens=False, ignore_eos=True, max_tokens=6) == (
            "one two three four<|im_end|>one",
            "length",
            None,
        )
        assert await ask(ignore_eos=True, stop_token_ids=[2]) == ("one two three four", "stop", 2)


async def test_calls_of_tools(scripted: StartScripted) -> None:
    server = await scripted(CALLS, chat_template=HERMES, max_model_len=512)
    async with sdk(server) as client:
        found, answer = await both(client, tools=TOOLS)
        assert found[0]["content"] == "Let me see.\n"
        assert found[0]["reasons"] == ["tool_calls"]
        assert [(call["name"], json.loads(call["arguments"])) for call in found[0]["calls"].values()] == [
            (["weather"], {"city": "Köln"}),
            (["time"], {"city": "Oslo"}),
        ]
        assert answer.choices[0].message.tool_calls is not None
        assert {call.type for call in answer.choices[0].message.tool_calls} == {"function"}

        found, _ = await both(client, tools=TOOLS, parallel_tool_calls=False, n=2, logprobs=True)
        assert [len(choice["calls"]) for choice in found.values()] == [1, 1]
        for choice in found.values():
            assert bytes(byte for token in choice["logprobs"] for byte in token.bytes).decode() == CALLS

        found, answer = await both(client, tools=TOOLS, tool_choice="none")
        assert (found[0]["content"], found[0]["calls"], found[0]["reasons"]) == (CALLS, {}, ["stop"])
        assert answer.usage is not None
        # Tools that must not be called are none of the prompt.
        plain = await client.chat.completions.create(**BODY, max_tokens=1)
        assert plain.usage is not None
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens

        found, _ = await both(client, tools=TOOLS, max_tokens=12)
        assert found[0]["reasons"] == ["length"]

        talk: Any = [*USER, answer.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": "x", "content": "5"}]
        await client.chat.completions.create(model=MODEL, messages=talk, tools=TOOLS)
        with pytest.raises(BadRequestError, match="can't both rule"):
            await client.chat.completions.create(
                **BODY, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
            )


async def test_tools_are_refused_where_the_template_would_drop_them(scripted: StartScripted) -> None:
    server = await scripted(TEXT)
    async with sdk(server) as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(**BODY, tools=TOOLS)
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
