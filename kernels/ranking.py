"""The order of a row's tokens: larger logit first, lower id first among equals, NaN last. Exact on every device."""

from __future__ import annotations

from typing import Final

import torch

_LARGEST: Final = torch.finfo(torch.float32).max


def clean(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` ``[n, vocab]`` as fp32 with NaN made -inf and +inf the largest number; and each row's largest,
    ``[n, 1]``. Logits that need nothing are returned themselves where a look at the device costs nothing."""
    values = logits.float()
    peak = values.amax(dim=-1, keepdim=True)  # NaN where there is one
    if not values.is_cpu or not bool((peak < torch.inf).all()):
        values = torch.nan_to_num(values, nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
        peak = values.amax(dim=-1, keepdim=True)
    return values, peak


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """int32 that compare as the fp32 ``values`` (no NaN) do; -0.0 equals 0.0."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` (at most ``vocab``) of each row of ``values`` (fp32 ``[n, vocab]``, clean) in order, and
    their ids (int64); each ``[n, count]``."""
    vocab = values.shape[1]
    if not values.is_cpu:
        return _top_by_key(values, count)
    found, ids = values.topk(min(count + 1, vocab), dim=-1)
    # ``topk`` orders equals as it likes, and picks as it likes where the border runs between equals.
    equal = found[:, 1:] == found[:, :-1]
    if not bool(equal.any()):
        return found[:, :count], ids[:, :count]
    torn = equal[:, count - 1] if count < vocab else equal.new_zeros(len(values))
    ids, order = ids[:, :count].sort(dim=-1)
    found, order = found.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if bool(torn.any()):
        at = torn.nonzero().squeeze(1)
        found[at], ids[at] = _top_by_key(values[at], count)
    return found, ids


def _top_by_key(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By one integer for each token that holds its value and its id, so that no two are equal."""
    vocab = values.shape[1]
    descending_ids = torch.arange(vocab - 1, -1, -1, dtype=torch.int64, device=values.device)
    keys = (ordered_bits(values).to(torch.int64) << 32) | descending_ids
    ids = vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def rank(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The place of each row's token in the row's order, from 1. ``values`` fp32 ``[n, vocab]``, clean; ``token_ids``
    int64 ``[n]``; gives int64 ``[n]``."""
    token_ids = token_ids.unsqueeze(1)
    value = values.gather(1, token_ids)
    ids = torch.arange(values.shape[1], device=values.device)
    before = (values > value) | ((values == value) & (ids < token_ids))
    return before.sum(dim=-1) + 1
