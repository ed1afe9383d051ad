"""A worker that answers in the words of chat completions, and the official SDK before the gateway."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": True,
}
USAGE: dict[str, Any] = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


@contextlib.asynccontextmanager
async def sdk_of(gateway: Any, key: str | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key=key or gateway.key, max_retries=0, timeout=20
    ) as sdk:
        yield sdk


def _data(kind: str, **said: Any) -> bytes:
    return json.dumps({"id": "c", "object": kind, "created": 1, "model": "m"} | said).encode()


def chunk(finish: str | None = None, logprobs: Any = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return _data("chat.completion.chunk", choices=[choice])


def call_chunk(index: int, arguments: str, **first: Any) -> bytes:
    function = {"arguments": arguments} | ({"name": first.pop("name")} if "name" in first else {})
    return chunk(tool_calls=[{"index": index, "function": function} | first])


def usage_chunk() -> bytes:
    return _data("chat.completion.chunk", choices=[], usage=USAGE)


def completion(finish: str = "stop", **message: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish}
    return _data("chat.completion", choices=[choice], usage=USAGE)


def saying(*pieces: str, finish: str = "stop") -> Any:
    """A script: says the pieces, streamed or whole."""

    async def script(c: Any) -> None:
        if not c.body.get("stream"):
            await c.whole(completion(finish, content="".join(pieces)))
            return
        await c.begin()
        await c.event(chunk(role="assistant", content=""))
        for piece in pieces:
            await c.event(chunk(content=piece))
        await c.event(chunk(finish))
        await c.event(usage_chunk())
        await c.done()

    return script


async def calling(c: Any) -> None:
    """A script: thinks, speaks, and calls a function twice, the pieces of both calls in turn."""
    if not c.body.get("stream"):
        functions = [{"name": "weather", "arguments": json.dumps({"town": town})} for town in ("Rome", "Oslo")]
        calls = [{"id": f"call_{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
        await c.whole(completion("tool_calls", reasoning_content="Two towns.", content="Looking.", tool_calls=calls))
        return
    await c.begin()
    await c.event(chunk(role="assistant", reasoning_content="Two "))
    await c.event(chunk(reasoning_content="towns."))
    await c.event(chunk(content="Looking."))
    await c.event(call_chunk(0, "", id="call_0", type="function", name="weather"))
    await c.event(call_chunk(1, '{"town": ', id="call_1", type="function", name="weather"))
    await c.event(call_chunk(0, '{"town": "Rome"}'))
    await c.event(call_chunk(1, '"Oslo"}'))
    await c.event(chunk("tool_calls"))
    await c.event(usage_chunk())
    await c.done()
