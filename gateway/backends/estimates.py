"""Tokens of an answer whose backend tells none."""

from __future__ import annotations

from gateway.backends.backend import Order
from gateway.billing.usage import TokenUsage

BYTES_PER_TOKEN = 4


def estimated(order: Order, completion_tokens: int) -> TokenUsage:
    """Events are counted for tokens, and some have none: so never more than what was reserved for."""
    prompt, completion = order.prompt_tokens, completion_tokens
    if prompt is None:
        prompt = min(-(-order.prompt_bytes // BYTES_PER_TOKEN), order.context_length)
    if order.output_tokens is not None:
        completion = min(completion, order.output_tokens)
    return TokenUsage(prompt, completion, source="estimated")
