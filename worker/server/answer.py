"""How an answer goes over the wire: as one JSON body, as events, and with the gateway's meter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from worker.protocol.sse import DONE, encode_event
from worker.protocol.usage import Usage, encode_meter
from worker.server.choices import Answer, Update


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of one answer repeats. ``created``: seconds since the epoch."""

    id: str
    created: int
    model: str


class Writer(Protocol):
    """Writes one answer in the shape of its protocol, as JSON texts: a whole answer gives one, at the end."""

    def push(self, update: Update) -> list[bytes]:
        """What an update adds."""
        ...

    def end(self, usage: Usage) -> list[bytes]:
        """What comes when every choice is complete."""
        ...


async def whole_body(answer: Answer, writer: Writer) -> bytes:
    """The JSON of a whole answer, once it is complete. Raises ApiError."""
    async for update in answer.updates():
        writer.push(update)
    (body,) = writer.end(answer.usage)
    return body


async def events(answer: Answer, writer: Writer, *, metered: bool) -> AsyncIterator[bytes]:
    """What ``writer`` gives, as events, then ``[DONE]``. With ``metered``, running usage in comments before them.

    Raises ApiError.
    """
    async for update in answer.updates():
        parts = [encode_meter(answer.meter)] if metered else []
        parts += map(encode_event, writer.push(update))
        if answer.finished:
            parts += map(encode_event, writer.end(answer.usage))
            parts.append(encode_event(DONE))
        if parts:
            yield b"".join(parts)
