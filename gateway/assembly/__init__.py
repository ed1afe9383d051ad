"""A stream's events put together as the whole answer, and a whole answer told as a stream; and what it comes to.

Pure functions over JSON, in the words of the API that the client called. ``chat.py``, ``messages.py`` and
``responses.py`` put together, their ``*_replay.py`` take apart, ``facts.py`` looks.
"""

from __future__ import annotations

from typing import Protocol

from gateway.apis import Api
from gateway.assembly.chat import ChatAssembler
from gateway.assembly.chat_replay import chat_events, completion_events
from gateway.assembly.echoes import with_echo_of
from gateway.assembly.facts import AnswerFacts, describe
from gateway.assembly.messages import MessagesAssembler
from gateway.assembly.messages_replay import message_events
from gateway.assembly.responses import ResponsesAssembler
from gateway.assembly.responses_replay import response_events
from gateway.assembly.single import SingleAssembler
from gateway.backends.lenient_json import decoded
from gateway.billing.usage import TokenUsage

__all__ = ["AnswerFacts", "Assembler", "assembler", "describe", "replay", "with_echo_of"]


class Assembler(Protocol):
    @property
    def over(self) -> bool:
        """Whether more came than there is room for: the answer is cut."""

    def feed(self, event: bytes) -> None:
        """JSON of one event, as the client gets it. What is no event of the API's is passed over."""

    def whole(self, usage: TokenUsage | None) -> bytes | None:
        """JSON of the answer in the API's own shape, with what came so far. None: nothing came.

        ``usage``: told where the stream did not tell it.
        """


def assembler(api: Api, *, limit: int) -> Assembler:
    """For one stream. ``limit``: bytes of content that are kept at most."""
    if api == "messages":
        return MessagesAssembler(limit=limit)
    if api == "responses":
        return ResponsesAssembler(limit=limit)
    if api == "embeddings":
        return SingleAssembler(limit=limit)
    return ChatAssembler(api, limit=limit)


def replay(api: Api, body: bytes, *, include_usage: bool) -> list[bytes]:
    """JSON of the events of a stream that says the same; none where the body is no answer.

    ``include_usage``: whether the client of a chat completion or completion asked for it; the other APIs always tell.
    """
    answer = decoded(body)
    if not isinstance(answer, dict):
        return []
    if api == "messages":
        return message_events(answer)
    if api == "responses":
        return response_events(answer)
    if api == "embeddings":
        return [body]
    events = chat_events if api == "chat_completions" else completion_events
    return events(answer, include_usage=include_usage)
