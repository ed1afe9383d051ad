"""Whose is the time of a step? The cost model behind ``compute_us``.

A token's cost is the model's dense part plus attention over its context. With ``d`` the hidden size, a decoder layer
has about 12 d² weights, 24 d² operations a token, and attention 4 d operations for each token attended to: attention
over ``6 d`` tokens costs as much as all the rest. So the token at position ``p`` costs ``6 d + p + 1`` units, and a
step's microseconds are split in that proportion, by largest remainder: not one is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_HIDDEN_SIZE = 1024
"""For a model that doesn't say."""


class CostModel:
    """What tokens cost beside each other; integers, so that the cost of a span is the sum of any cut of it."""

    def __init__(self, hidden_size: int) -> None:
        self.dense = 6 * (hidden_size or DEFAULT_HIDDEN_SIZE)
        """Units of a token that attends to nothing."""

    def units(self, start: int, end: int) -> int:
        """Of the tokens at positions ``start`` to ``end`` (excluded)."""
        return (end - start) * self.dense + (end * (end + 1) - start * (start + 1)) // 2


def split(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` (at least 0) in integer parts that add up to it, each within 1 of its exact share of ``weights``
    (above 0)."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    missing = total - sum(parts)
    if missing:
        remainders = [total * weight % whole for weight in weights]
        for index in sorted(range(len(weights)), key=remainders.__getitem__, reverse=True)[:missing]:
            parts[index] += 1
    return parts
