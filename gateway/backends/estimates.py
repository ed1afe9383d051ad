"""Tokens of an answer whose backend tells none."""

from __future__ import annotations

import re

from gateway.backends.backend import Order
from gateway.billing.usage import TokenUsage

BYTES_PER_TOKEN = 4
_TEXT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|thinking|refusal|arguments|partial_json)"\s*:\s*'
    rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"',
    re.DOTALL,
)


class TextCount:
    """Counts an answer by its text: most servers send a token an event, others several; an event without text has none.

    What a model says is in fields of these names, whatever the API; found in the bytes, since each event comes by here.
    """

    def __init__(self) -> None:
        self._events = 0
        self._bytes = 0

    def add(self, data: bytes) -> None:
        """The JSON of one event, or of a whole answer."""
        size = sum(map(len, _TEXT.findall(data)))
        if size:
            self._events += 1
            self._bytes += size

    @property
    def tokens(self) -> int:
        return max(self._events, -(-self._bytes // BYTES_PER_TOKEN))


def estimated(order: Order, completion_tokens: int) -> TokenUsage:
    """Never more than what was reserved for."""
    prompt, completion = order.prompt_tokens, completion_tokens
    if prompt is None:
        prompt = min(-(-order.prompt_bytes // BYTES_PER_TOKEN), order.context_length * order.prompts)
    if order.output_tokens is not None:
        completion = min(completion, order.output_tokens)
    return TokenUsage(prompt, completion, source="estimated")
