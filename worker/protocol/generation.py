"""What requests for text have in common, whether as a chat or as a plain completion.

References: https://platform.openai.com/docs/api-reference/chat and .../completions. The fields that OpenAI does not
know (``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``min_tokens``, ``ignore_eos``,
``include_stop_str_in_output``, ``allowed_token_ids``, ``skip_special_tokens``) bear vLLM's names and meaning.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Ranges are checked by the server, which names the field that is wrong."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
