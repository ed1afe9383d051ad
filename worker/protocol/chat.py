"""Chat completions: the request a worker accepts and the answers it gives.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from worker.protocol.generation import GenerationRequest
from worker.protocol.usage import Usage

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatRequest(GenerationRequest, kw_only=True):
    """A request as it came; ranges are checked by the server, which names the field that is wrong."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """``bytes``: the token's own, which may be part of a character; ``token`` has U+FFFD there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments``: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, frozen=True):
    """``stop_reason``: the stop string or the id out of ``stop_token_ids`` that ended the text, as vLLM tells it."""

    index: int
    message: Message
    finish_reason: FinishReason | None
    logprobs: ChoiceLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str | None = None


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """``id``, ``type`` and the name come once, with the first piece of a call."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCallDelta | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


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
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """Most tokens of prompt and output together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
