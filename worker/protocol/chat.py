"""Chat completions: the request a worker accepts and the answers it gives.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from worker.protocol.usage import Usage

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True):
    """A request as it came; ranges are checked by the server, which names the field that is wrong."""

    model: str
    messages: list[dict[str, Any]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    refusal: str | None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed event. ``usage`` is absent unless asked for; then null but in the last chunk, as OpenAI has it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
