"""Log-probabilities of tokens under raw logits."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kernels.ranking import clean, rank, top
from kernels.slices import row_slices

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
    """``logits`` ``[n, vocab]``, raw; ``token_ids`` int64 ``[n]``; at least one row."""
    count = min(count, logits.shape[1])
    parts = [_slice_of(logits[some], token_ids[some], count) for some in row_slices(logits)]
    return parts[0] if len(parts) == 1 else Logprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _slice_of(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    values, _ = clean(logits)
    normalised = torch.nan_to_num(torch.log_softmax(values, dim=-1), nan=LEAST_LOGPROB).clamp_min_(LEAST_LOGPROB)
    top_ids = top(values, count)[1] if count else token_ids.new_zeros(len(values), 0)
    return Logprobs(
        normalised.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        rank(values, token_ids),
        top_ids,
        normalised.gather(1, top_ids),
    )
