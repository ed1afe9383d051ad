"""Usage as protocols report it, made one: OpenAI counts cached tokens inside the prompt, Anthropic beside it.

Reports are running totals: of each field the last value counts, and what a later report leaves out stays as it was.
What is no count is taken as not reported. Nothing here raises, whatever a backend sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.billing.usage import TokenUsage

MAX_TOKENS = 10**12
_NOTHING = TokenUsage()
_PROMPT, _INPUT = ("prompt_tokens",), ("input_tokens",)
_COMPLETION, _OUTPUT = ("completion_tokens",), ("output_tokens",)


def openai_usage(reported: object, before: TokenUsage = _NOTHING) -> TokenUsage:
    """Chat completions' and completions' ``usage``, and that of the Responses API, which calls it input and output.

    Tokens of audio, images and predictions are inside the totals and not told apart. ``before``: the totals so far;
    given back as they are if nothing can be read.
    """
    prompt = _first(reported, _PROMPT, _INPUT)
    cached = _first(
        reported,
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("prompt_cache_hit_tokens",),
    )
    written = _first(
        reported, ("prompt_tokens_details", "cache_write_tokens"), ("input_tokens_details", "cache_write_tokens")
    )
    completion = _first(reported, _COMPLETION, _OUTPUT)
    reasoning = _first(
        reported, ("completion_tokens_details", "reasoning_tokens"), ("output_tokens_details", "reasoning_tokens")
    )
    if prompt is cached is written is completion is reasoning is None:
        return before
    return _total(
        before,
        prompt=_or(prompt, before.prompt_tokens),
        cached=_or(cached, before.cached_tokens),
        written=_or(written, before.cache_write_tokens),
        completion=_or(completion, before.completion_tokens),
        reasoning=_or(reasoning, before.reasoning_tokens),
    )


def openai_tells(reported: object) -> tuple[bool, bool]:
    """Whether there is a count of the prompt's tokens in it, and one of the output's."""
    prompt = _first(reported, _PROMPT, _INPUT)
    completion = _first(reported, _COMPLETION, _OUTPUT)
    return prompt is not None, completion is not None


def anthropic_usage(reported: object, before: TokenUsage = _NOTHING) -> TokenUsage:
    """``usage`` of Messages: of a whole answer, of ``message_start``, or of ``message_delta``.

    ``input_tokens`` are those neither read from a cache nor written to one. ``before``: the totals so far; given back
    as they are if nothing can be read.
    """
    fresh = _first(reported, ("input_tokens",))
    cached = _first(reported, ("cache_read_input_tokens",))
    written = _first(reported, ("cache_creation_input_tokens",))
    if written is None:
        kinds = [
            _first(reported, ("cache_creation", name))
            for name in ("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens")
        ]
        written = None if kinds == [None, None] else min(sum(filter(None, kinds)), MAX_TOKENS)
    completion = _first(reported, ("output_tokens",))
    reasoning = _first(reported, ("output_tokens_details", "thinking_tokens"))
    if fresh is cached is written is completion is reasoning is None:
        return before
    fresh = _or(fresh, max(before.prompt_tokens - before.cached_tokens - before.cache_write_tokens, 0))
    cached, written = _or(cached, before.cached_tokens), _or(written, before.cache_write_tokens)
    return _total(
        before,
        prompt=fresh + cached + written,
        cached=cached,
        written=written,
        completion=_or(completion, before.completion_tokens),
        reasoning=_or(reasoning, before.reasoning_tokens),
    )


def _total(
    before: TokenUsage, *, prompt: int, cached: int, written: int, completion: int, reasoning: int
) -> TokenUsage:
    """Parts are no more than the whole that they are parts of."""
    prompt = min(prompt, MAX_TOKENS)
    cached = min(cached, prompt)
    return TokenUsage(
        prompt,
        completion,
        cached,
        "backend",
        min(written, prompt - cached),
        min(reasoning, completion),
        before.images,
        before.compute_us,
    )


def _first(reported: object, *paths: Iterable[str]) -> int | None:
    """The first of these that is a count."""
    for path in paths:
        value: Any = reported
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return value
    return None


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
