"""Running totals of one answer in OpenAI's words: what its backend told, and an estimate of what it did not tell."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from gateway.backends.backend import Order
from gateway.backends.estimates import TextCount, estimated
from gateway.billing.normalise import openai_tells, openai_usage
from gateway.billing.usage import TokenUsage

_WITHOUT_OUTPUT: Final = frozenset({"embeddings"})


class Totals:
    """A report holds for what was said until then. What is said behind it is estimated until the next one, for an
    answer that is broken off cost that as well; at the good end the last report is the truth. Prompt or output of which
    no report tells a count is estimated: it is not nothing.
    """

    __slots__ = ("_latest", "_order", "_output_told", "_prompt_told", "_reported", "_since")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._reported = TokenUsage()
        self._prompt_told = False
        self._output_told = order.api in _WITHOUT_OUTPUT
        self._since = TextCount()
        """What was said since the output's tokens were told last."""
        self._latest: TokenUsage | None = None

    def told(self, reported: object) -> bool:
        """Take a report; whether it tells the output's tokens."""
        self._reported = openai_usage(reported, self._reported)
        prompt, output = openai_tells(reported)
        self._prompt_told = self._prompt_told or prompt
        if output:
            self._output_told = True
            self._since = TextCount()
        return output

    def said(self, data: bytes) -> None:
        """The JSON of an event, or of a whole answer, of which no report tells yet."""
        self._since.add(data)

    def changed(self) -> TokenUsage | None:
        """The totals of an answer that goes on, if they are others than last time."""
        known = self._prompt_told or self._reported != TokenUsage() or self._since.tokens
        usage = self._now(self._since.tokens) if known else None
        if usage is None or usage == self._latest:
            return None
        self._latest = usage
        return usage

    def final(self) -> TokenUsage:
        """The totals at the good end."""
        return self._now(0 if self._output_told else self._since.tokens)

    def _now(self, since: int) -> TokenUsage:
        reported = self._reported
        if self._prompt_told and self._output_told and not since:
            return reported
        guess = estimated(self._order, since)
        completion = reported.completion_tokens + guess.completion_tokens
        if self._order.output_tokens is not None:
            completion = min(completion, max(self._order.output_tokens, reported.completion_tokens))
        prompt = reported.prompt_tokens if self._prompt_told else guess.prompt_tokens
        return replace(reported, prompt_tokens=prompt, completion_tokens=completion, source="estimated")
