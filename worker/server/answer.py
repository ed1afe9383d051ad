"""How a completion is written to the wire: as one JSON body, as events, and with the gateway's meter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from worker.protocol.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    FinishReason,
    Message,
)
from worker.protocol.sse import DONE, encode_event
from worker.protocol.usage import Usage, encode_meter
from worker.server.completion import Completion

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of one answer repeats. ``created``: seconds since the epoch."""

    id: str
    created: int
    model: str


async def whole_body(head: AnswerHead, completion: Completion) -> bytes:
    """The JSON of a whole answer, once it is complete. Raises ApiError."""
    text: list[str] = []
    finish_reason: FinishReason | None = None
    async for update in completion.updates():
        text.append(update.text)
        finish_reason = update.finish_reason
    return _whole(head, "".join(text), finish_reason, completion.usage)


async def metered_whole(head: AnswerHead, completion: Completion) -> AsyncIterator[bytes]:
    """The same JSON as the one event of a stream, with running usage in comments while it is made. Raises ApiError."""
    text: list[str] = []
    async for update in completion.updates():
        text.append(update.text)
        reading = encode_meter(completion.meter)
        if update.finish_reason is None:
            yield reading
        else:
            body = _whole(head, "".join(text), update.finish_reason, completion.usage)
            yield reading + encode_event(body) + encode_event(DONE)


async def streamed(
    head: AnswerHead, completion: Completion, *, include_usage: bool, metered: bool
) -> AsyncIterator[bytes]:
    """The chunks of a streamed answer as events: the role first, then text as it comes, one finish reason, the usage
    if asked for, ``[DONE]``. With ``metered``, running usage in comments before them. Raises ApiError.
    """
    absent = None if include_usage else msgspec.UNSET

    def chunk(choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None = absent) -> bytes:
        return encode_event(
            _encode(
                ChatCompletionChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
            )
        )

    first = True
    async for update in completion.updates():
        parts: list[bytes] = [encode_meter(completion.meter)] if metered else []
        if first and completion.completion_tokens:
            parts.append(chunk([ChunkChoice(0, Delta(role="assistant", content=""))]))
            first = False
        if update.text:
            parts.append(chunk([ChunkChoice(0, Delta(content=update.text))]))
        if update.finish_reason is not None:
            parts.append(chunk([ChunkChoice(0, Delta(), update.finish_reason)]))
            if include_usage:
                parts.append(chunk([], completion.usage))
            parts.append(encode_event(DONE))
        if parts:
            yield b"".join(parts)


def _whole(head: AnswerHead, text: str, finish_reason: FinishReason | None, usage: Usage) -> bytes:
    return _encode(
        ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[Choice(0, Message("assistant", text), finish_reason)],
            usage=usage,
        )
    )
