"""Log-probabilities of raw logits, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.logprobs import logprobs_of
from kernels.readback import Readback
from worker.engine.plan import TokenLogprobs


class PendingLogprobs:
    """Of one token a row of raw ``logits`` ``[n, vocab]``, submitted now and read later.

    ``token_ids`` int64 ``[n]``, on the same device; ``counts``: how many of the likeliest each row wants as well.
    Log-probabilities below -9999 are given as that.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> None:
        self._counts = counts
        found = logprobs_of(logits, token_ids, max(counts, default=0))
        self._columns = [
            Readback(column) for column in (token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        ]

    def read(self) -> list[TokenLogprobs]:
        """One a row. Waits for the device."""
        columns = [column.read().tolist() for column in self._columns]
        return [
            TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
            for count, token_id, logprob, rank, top_ids, top_logprobs in zip(self._counts, *columns, strict=True)
        ]


def prompt_logprobs(logits: torch.Tensor, next_token_ids: torch.Tensor, top: int) -> list[TokenLogprobs]:
    """Of the token that follows each row's position, at once: see ``PendingLogprobs``."""
    return PendingLogprobs(logits, next_token_ids, [top] * len(next_token_ids)).read()
