"""Pieces of answers, good and bad, and scripts that send them: over plain sockets, so that nothing is put right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from tests.gateway.conftest import EVENT_STREAM, Conversation

Ending = Literal["good", "closed", "reset", "kept"]
Heard = asyncio.Event
"""Set once the client got all the text that it is to get."""
Script = Callable[[Conversation, Heard], Awaitable[None]]
JSON = "application/json"


def event(value: object, *, ascii_only: bool = True) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, ensure_ascii=ascii_only).encode()


def named(value: dict[str, Any]) -> bytes:
    """As Anthropic sends it."""
    return b"event: %b\n%b" % (value["type"].encode(), event(value))


# OpenAI's words.


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "theirs"}
    return event(head | {"choices": [choice]} | more)


def usage(prompt: Any = 9, completion: Any = 3, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 12} | more


def usage_chunk(*counts: Any, **more: Any) -> bytes:
    return chunk({}, usage=usage(*counts), **({"choices": []} | more))


def completion(text: Any = "Paris", **more: Any) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "theirs"}
    return json.dumps(head | {"choices": [choice], "usage": usage()} | more).encode()


def error(message: Any = "It broke.", type: Any = "server_error", code: Any = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": None, "code": code}}


ROLE = chunk({"role": "assistant", "content": ""})
PAR, IS = chunk({"content": "Par"}), chunk({"content": "is"})
FINISH = chunk({}, "stop")
USAGE = usage_chunk()
DONE = b"data: [DONE]\n\n"
SAID = (ROLE, PAR, IS, FINISH)

# Anthropic's words.


def message(*, usage: Any, content: Sequence[Any] = (), stop_reason: str | None = None, **more: Any) -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "theirs", "content": list(content)}
    return head | {"stop_reason": stop_reason, "stop_sequence": None, "usage": usage} | more


def message_start(**more: Any) -> bytes:
    begun = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}
    return named({"type": "message_start", "message": message(**({"usage": begun} | more))})


def block_delta(text: Any, index: Any = 0) -> bytes:
    return named({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}})


def message_delta(**told: Any) -> bytes:
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    return named({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3} | told})


def theirs_error(kind: str, text: str = "It broke.") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_1"}


START = message_start()
BLOCK = named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
BLOCK_END = named({"type": "content_block_stop", "index": 0})
DELTA = message_delta()
STOP = named({"type": "message_stop"})
TOLD = (START, BLOCK, block_delta("Par"), block_delta("is"), BLOCK_END)
WHOLE_USAGE = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3}


def whole_message(**more: Any) -> bytes:
    said = {"content": [{"type": "text", "text": "Paris"}], "stop_reason": "end_turn", "usage": WHOLE_USAGE}
    return json.dumps(message(**(said | more))).encode()


# Scripts.


def streams(*pieces: bytes, ending: Ending = "good", head: str = EVENT_STREAM, each: int = 0) -> Script:
    """Sends the pieces, a chunk each, or in chunks of ``each`` bytes; ``good``: then HTTP's own end of a body."""

    async def script(c: Conversation, heard: Heard) -> None:
        await c.send(f"{head}{c.ending}\r\n".encode())
        body = b"".join(pieces)
        cut = [body[at : at + each] for at in range(0, len(body), each)] if each else pieces
        for piece in cut:
            await c.send_piece(piece)
        if ending == "good":
            await c.send(b"0\r\n\r\n")
        elif ending == "reset":
            # It throws away what the other side has not read yet.
            await heard.wait()
            await asyncio.sleep(0.1)
            c.reset()
        elif ending == "kept":
            await c.wait_closed_by_peer(20)

    return script


def answers(status: int, body: object = b"", *, media_type: str = JSON, more: str = "") -> Script:
    """One body, with its length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(c: Conversation, heard: Heard) -> None:
        await c.status(status, raw, media_type=media_type, more=more)

    return script


def sends(raw: bytes) -> Script:
    """These bytes and nothing else, then the end of the connection."""

    async def script(c: Conversation, heard: Heard) -> None:
        await c.send(raw)

    return script


async def says_nothing(c: Conversation, heard: Heard) -> None:
    await c.wait_closed_by_peer(20)
