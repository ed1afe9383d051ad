"""Plain completions: a prompt as text or tokens, and what comes after it.

Reference: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.protocol.generation import GenerationRequest
from worker.protocol.usage import Usage


class CompletionRequest(GenerationRequest, kw_only=True):
    """``prompt``: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token in each list; ``text_offset`` counts characters from the beginning of the choice's text.

    The first token of an echoed prompt has no log-probability: nothing stands before it.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """``stop_reason``: the stop string or the id out of ``stop_token_ids`` that ended the text, as vLLM tells it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one event of a stream: both have one shape.

    ``usage`` is absent from events unless asked for; then null but in the last, as in chats.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
