"""Drawing the next token from logits: reproducibly, and for each row as if it were alone.

A draw is one uniform number, named by seed, choice and absolute position (``kernels.philox``), put through the inverse
of the cumulative distribution in the order of token ids. Weights are fixed-point integers: their sums don't depend on
the order of addition, so neither the batch nor the device nor the way that leads to a sum can change a draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.ranking import clean, top
from kernels.truncation import keep_first, share

_ONE: Final = float(1 << 40)
"""Weight of a row's likeliest token. Tokens less likely than it by more than this factor are never drawn."""
_PREFIX: Final = 256
"""Likeliest tokens that are looked at first; most nuclei lie among them."""
_TINY: Final = torch.finfo(torch.float32).tiny
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """How each row is drawn, on the host; all ``[n]``.

    ``temperature`` float64, above 0, brought into fp32's normal range; ``top_k`` int64, 0 for all; ``top_p`` float64 in
    (0, 1]; ``min_p`` float64 in [0, 1]; ``uniforms`` float64 in [0, 1).
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniforms: npt.NDArray[np.float64]

    def take(self, rows: npt.NDArray[np.int64]) -> DrawParameters:
        return DrawParameters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniforms[rows]
        )


def greedy(logits: torch.Tensor, fallback: int = 0) -> torch.Tensor:
    """The index of each row's largest logit; the first of equals, and NaN never wins. A row of nothing but NaN and -inf
    gives ``fallback``. ``[n, vocab]`` to int64 ``[n]``."""
    best, index = logits.max(dim=-1)
    if logits.is_cpu:
        if bool((best > -torch.inf).all()):
            return index
        best, index = torch.where(logits.isnan(), -torch.inf, logits).max(dim=-1)
    else:
        best, index = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=-1)
    return torch.where(best > -torch.inf, index, fallback)


def sample(
    logits: torch.Tensor, draws: DrawParameters, fallback: int = 0, *, prefix: int | None = None
) -> torch.Tensor:
    """Draw one token for each row of ``logits`` ``[n, vocab]``; int64 ``[n]``.

    In this order: the logits are divided by ``temperature``; ``top_k`` keeps the first so many in the order of
    ``kernels.ranking``; ``top_p`` keeps of these, made to sum to 1 again, the fewest first ones whose probability
    reaches it (Holtzman et al., 2020); ``min_p`` keeps of these the ones at least that share as likely as the likeliest
    (Nguyen et al., 2024). A NaN counts as impossible, +inf as the largest number; a row without any possible token
    gives ``fallback``.

    ``prefix``: how many of the likeliest to look at before the whole vocabulary; no more than a matter of speed. By
    default 0 on devices where a look at the result would make the host wait.
    """
    values, peak = clean(logits)
    vocab = values.shape[1]
    if prefix is None:
        prefix = _PREFIX if values.is_cpu else 0
    cut = ((draws.top_k > 0) & (draws.top_k < vocab)) | (draws.top_p < 1.0)
    short = cut & ((draws.top_k <= prefix) if prefix else np.zeros_like(cut))
    tokens = torch.empty(len(values), dtype=torch.int64, device=values.device)
    left = ~short
    if short.any():
        rows = np.flatnonzero(short)
        wanted = draws.top_k[rows]
        width = prefix if (wanted == 0).any() else int(wanted.max())
        found, settled = _from_prefix(*_select(values, peak, draws, rows), min(width, vocab), fallback)
        _put(tokens, rows, found)
        if not bool(settled.all()):
            left[rows[~settled.numpy(force=True)]] = True
    for group in (left & ~cut, left & cut):
        if group.any():
            rows = np.flatnonzero(group)
            _put(tokens, rows, _from_whole(*_select(values, peak, draws, rows), fallback))
    return tokens


def _select(
    values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters, rows: npt.NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor, DrawParameters]:
    if len(rows) == len(values):
        return values, peak, draws
    at = torch.from_numpy(rows).to(values.device)
    return values.index_select(0, at), peak.index_select(0, at), draws.take(rows)


def _put(tokens: torch.Tensor, rows: npt.NDArray[np.int64], found: torch.Tensor) -> None:
    tokens.index_copy_(0, torch.from_numpy(rows).to(tokens.device), found)


def _column(values: npt.NDArray[np.float64] | npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)


def _relative(values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters) -> torch.Tensor:
    """Probabilities as shares of the likeliest token's; fp32, the shape of ``values``."""
    temperature = _column(np.clip(draws.temperature, _TINY, _LARGEST), values).float()
    # The peak is taken off first, so that a tiny temperature does not overflow. An impossible row's is -inf.
    return ((values - peak.clamp_min(-_LARGEST)) / temperature).exp_()


def _weights(relative: torch.Tensor) -> torch.Tensor:
    return (relative * _ONE).to(torch.int64)


def _from_whole(values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters, fallback: int) -> torch.Tensor:
    """Draws from all of the vocabulary."""
    vocab = values.shape[1]
    relative = _relative(values, peak, draws)
    weights = _weights(relative)
    top_k = np.where(draws.top_k > 0, draws.top_k, vocab)
    if (top_k < vocab).any():
        first = keep_first(values, torch.ones_like(weights), _column(top_k, values))
        weights.masked_fill_(~first, 0)
    if (draws.top_p < 1.0).any():
        target = share(weights.sum(dim=-1, keepdim=True), _column(draws.top_p, values))
        weights.masked_fill_(~keep_first(values, weights, target), 0)
    if draws.min_p.any():
        weights.masked_fill_(relative < _column(draws.min_p, values).float(), 0)
    tokens, possible = _inverse(weights, draws)
    return torch.where(possible, tokens, fallback)


def _from_prefix(
    values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters, prefix: int, fallback: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws of rows whose cut lies among the first ``prefix`` tokens, and which rows these are (bool ``[n]``).
    ``draws.top_k`` is at most ``prefix``."""
    vocab = values.shape[1]
    found, ids = top(values, prefix)
    relative = _relative(found, peak, draws)
    top_k = _column(np.where(draws.top_k > 0, draws.top_k, prefix), values)
    weights = _weights(relative).masked_fill_(torch.arange(prefix, device=values.device) >= top_k, 0)
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:].clone()
    endless = np.flatnonzero(draws.top_k == 0)
    if len(endless) and prefix < vocab:
        at = torch.from_numpy(endless).to(values.device)
        total[at] = _weights(_relative(*_select(values, peak, draws, endless))).sum(dim=-1, keepdim=True)
    target = share(total, _column(draws.top_p, values))
    settled = (reached[:, -1:] >= target).squeeze(1) | (total == 0).squeeze(1)
    weights.masked_fill_(reached - weights >= target, 0)
    if draws.min_p.any():
        weights.masked_fill_(relative < _column(draws.min_p, values).float(), 0)
    width = max(1, int((weights > 0).sum(dim=-1).max()))
    ids, order = ids[:, :width].sort(dim=-1)
    index, possible = _inverse(weights[:, :width].gather(1, order), draws)
    return torch.where(possible, ids.gather(1, index.unsqueeze(1)).squeeze(1), fallback), settled


def _inverse(weights: torch.Tensor, draws: DrawParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cumulative weight exceeds the uniform number's share of the total; and whether there is any
    weight. ``weights`` int64 ``[n, m]``; both results ``[n]``."""
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:].contiguous()
    place = (_column(draws.uniforms, weights) * total.to(torch.float64)).to(torch.int64)
    # Rounding may carry the product up to the total itself: then the last token of any weight is meant.
    index = torch.searchsorted(reached, torch.minimum(place, total - 1), right=True)
    possible = total > 0
    return torch.where(possible, index, 0).squeeze(1), possible.squeeze(1)
