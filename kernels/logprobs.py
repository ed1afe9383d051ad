"""Log-probabilities of tokens under raw logits."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kernels.ranking import clean, rank, top

LEAST_LOGPROB: Final = -9999.0
"""Stands for impossible tokens, so that every log-probability is a number that JSON can hold."""


class Logprobs(NamedTuple):
    """Of one token a row, and of the row's ``count`` likeliest in order (see ``kernels.ranking``)."""

    logprobs: torch.Tensor
    """fp32 ``[n]``, natural."""
    ranks: torch.Tensor
    """int64 ``[n]``, 1 for the likeliest."""
    top_ids: torch.Tensor
    """int64 ``[n, count]``."""
    top_logprobs: torch.Tensor
    """fp32 ``[n, count]``."""


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """``logits`` ``[n, vocab]``, raw; ``token_ids`` int64 ``[n]``; ``count`` at most ``vocab`` is honoured."""
    values, _ = clean(logits)
    normalised = torch.nan_to_num(torch.log_softmax(values, dim=-1), nan=LEAST_LOGPROB).clamp_min_(LEAST_LOGPROB)
    _, top_ids = top(values, min(count, values.shape[1])) if count else (None, token_ids.new_zeros(len(values), 0))
    return Logprobs(
        normalised.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        rank(values, token_ids),
        top_ids,
        normalised.gather(1, top_ids),
    )
