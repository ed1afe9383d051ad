"""Text to tokens and back, with the paths and shapes of vLLM: ``/tokenize``, ``/detokenize``, ``/tokenizer_info``."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt``, or ``messages`` with what a chat request may say about its template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    """Whether a ``prompt`` gets the tokens that the model wants in front; messages have theirs from the template."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """``prompt``: the text, special tokens spelled out."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients that template and count for themselves have to know; lm-eval asks for it."""

    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str
    model_max_length: int
