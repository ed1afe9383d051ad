"""Which tokens of a distribution top-k and top-p keep, exactly, without sorting the vocabulary."""

from __future__ import annotations

import torch

from kernels.ranking import ordered_bits


def keep_first(logits: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The shortest beginning of each row's order whose mass reaches ``target``: bool ``[n, vocab]``.

    ``logits`` fp32 ``[n, vocab]``, clean, give the order (see ``kernels.ranking``); ``mass`` int64 ``[n, vocab]``, not
    negative; ``target`` int64 ``[n, 1]``, above 0. A row whose whole mass is less is kept whole. Each row's smallest
    kept logit is found by bisection over the bits of fp32: at most 32 sums of the row.
    """
    keys = ordered_bits(logits)
    low, high = (keys.amin(dim=-1, keepdim=True).to(torch.int64), keys.amax(dim=-1, keepdim=True).to(torch.int64))
    none = mass.new_zeros(())
    for _ in range(32):
        if logits.is_cpu and torch.equal(low, high):
            break
        middle = low + (high - low + 1) // 2
        enough = torch.where(keys >= middle.to(torch.int32), mass, none).sum(dim=-1, keepdim=True) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    border = low.to(torch.int32)
    above, at = keys > border, keys == border
    mass_above = torch.where(above, mass, none).sum(dim=-1, keepdim=True)
    mass_at = torch.where(at, mass, none)
    return above | (at & (mass_above + mass_at.cumsum(dim=-1) - mass_at < target))


def share(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass that a nucleus must reach: ``top_p`` (float64) of ``total`` (int64), all of it from 1 on; at least 1."""
    part = (total.to(torch.float64) * top_p).ceil().to(torch.int64)
    return torch.where(top_p >= 1.0, total, torch.minimum(part, total)).clamp_min(1)
