"""Which tokens of a distribution top-k and top-p keep, exactly, without sorting the vocabulary."""

from __future__ import annotations

from typing import Final

import torch

from kernels.ranking import ordered_bits

_DIGITS: Final = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and width of the digits that a 32-bit key is taken apart into, from the top."""

LEAST_EXPONENT: Final = -30.0
"""Its exponential is too small to have a weight."""
_BINS_PER_UNIT: Final = 64
_MOST_SORTED: Final = 4096
"""For each row; above, sorting takes longer than selection by digits."""


def keep_first(logits: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The shortest beginning of each row's order whose mass reaches ``target``: bool ``[n, vocab]``.

    ``logits`` fp32 ``[n, vocab]``, clean, give the order (see ``kernels.ranking``); ``mass`` int64 ``[n, vocab]``, not
    negative; ``target`` int64 ``[n, 1]``, above 0 and at most the row's mass. Radix selection: each row's smallest kept
    logit is found digit by digit, from sums of the mass by digit.
    """
    keys = ordered_bits(logits).to(torch.int64).neg_().add_(0x7FFFFFFF)  # 0 for the largest
    border, left = torch.zeros_like(target), target
    for shift, width in _DIGITS:
        digits = 1 << width
        # Keys of other beginnings fall into a bin at either end.
        at = (keys >> shift).sub_((border << width) - 1).clamp_(0, digits + 1)
        sums = mass.new_zeros(len(mass), digits + 2).scatter_add_(1, at, mass)[:, 1:-1]
        reached = sums.cumsum(dim=-1)
        digit = torch.searchsorted(reached, left).clamp_max_(digits - 1)
        left = left - (reached - sums).gather(1, digit)
        border = (border << width) | digit
    equal = keys == border
    mass_equal = mass * equal
    return (keys < border).logical_or_(equal.logical_and_(mass_equal.cumsum(dim=-1).sub_(mass_equal) < left))


def trim(
    logits: torch.Tensor, exponents: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor, target: torch.Tensor
) -> None:
    """Set to 0 in place the ``weights`` of tokens outside of ``keep_first(logits, mass, target)``.

    ``exponents`` fp32 ``[n, vocab]``, from ``LEAST_EXPONENT`` (tokens whose weight is 0 already) to 0, must not fall as
    the logits rise. On CPU they sort tokens into fine bins, so that only the bin where the border runs needs sorting.
    """
    if not logits.is_cpu:
        weights.mul_(keep_first(logits, mass, target))
        return
    last = int(-LEAST_EXPONENT * _BINS_PER_UNIT)
    bins = (exponents * -_BINS_PER_UNIT).to(torch.int64)
    sums = mass.new_zeros(len(mass), last + 1).scatter_add_(1, bins, mass)
    reached = sums.cumsum(dim=-1)
    border = torch.searchsorted(reached, target).clamp_max_(last)
    rows, tokens = ((bins == border) & (border < last)).nonzero(as_tuple=True)
    if len(tokens) > _MOST_SORTED * len(logits):
        weights.mul_(keep_first(logits, mass, target))
        return
    # In the order of rows, and in each row from its largest logit down; ids go up already.
    order = logits[rows, tokens].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    rows, tokens = rows[order], tokens[order]
    near_mass, near_weights = mass[rows, tokens], weights[rows, tokens]
    before = near_mass.cumsum(dim=0) - near_mass
    # Of the same row and in other bins; then without what earlier rows have added.
    left = (target - (reached - sums).gather(1, border)).squeeze(1)
    counts = torch.bincount(rows, minlength=len(logits))
    first = (counts.cumsum(dim=0) - counts)[rows]
    kept = before - before[first] < left[rows]
    weights.mul_(bins <= border)
    weights[rows, tokens] = near_weights.mul_(kept)


def share(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass that a nucleus must reach: ``top_p`` (float64) of ``total`` (int64), all of it from 1 on; at least 1
    where there is any."""
    part = (total.to(torch.float64) * top_p).ceil().to(torch.int64).clamp_min(1)
    return torch.where(top_p >= 1.0, total, torch.minimum(part, total))
