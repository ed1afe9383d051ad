"""Drawing the next token from logits: reproducibly, and for each row as if it were alone.

A draw is one uniform number, named by seed, choice and absolute position (``kernels.philox``), put through the inverse
of the cumulative distribution in the order of token ids. Weights are fixed-point integers: their sums don't depend on
the order of addition, so neither the batch nor the way that leads to a sum can change a draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.ranking import clean, top
from kernels.slices import row_slices
from kernels.truncation import LEAST_EXPONENT, share, trim

_ONE: Final = float(1 << 40)
"""Weight of a row's likeliest token. Tokens less likely than it by more than this factor are never drawn."""
_SMALL_K: Final = 256
"""Up to here ``topk`` beats a pass over the whole vocabulary, on CPU."""
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

    def take(self, rows: npt.NDArray[np.int64] | slice) -> DrawParameters:
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


def sample(logits: torch.Tensor, draws: DrawParameters, fallback: int = 0) -> torch.Tensor:
    """Draw one token for each row of ``logits`` ``[n, vocab]``; int64 ``[n]``.

    In this order: the logits are divided by ``temperature``; ``top_k`` keeps the first so many in the order of
    ``kernels.ranking``; ``top_p`` keeps of these, made to sum to 1 again, the fewest first ones whose probability
    reaches it (Holtzman et al., 2020); ``min_p`` keeps of these the ones at least that share as likely as the likeliest
    (Nguyen et al., 2024). A NaN counts as impossible, +inf as the largest number; a row without any possible token
    gives ``fallback``.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for some in row_slices(logits):
        _sample(logits[some], draws.take(some), fallback, tokens[some])
    return tokens


def _sample(logits: torch.Tensor, draws: DrawParameters, fallback: int, tokens: torch.Tensor) -> None:
    """Draw into ``tokens``."""
    values, peak = clean(logits)
    few = (draws.top_k > 0) & (draws.top_k <= min(_SMALL_K, values.shape[1])) & values.is_cpu
    for group, draw in ((few, _from_few), (~few, _from_all)):
        if group.any():
            rows = np.flatnonzero(group)
            found, possible = draw(_rows(values, rows), _rows(peak, rows), draws.take(rows))
            _put(tokens, rows, torch.where(possible, found, fallback))


def _rows(values: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    if len(rows) == len(values):
        return values
    return values.index_select(0, torch.from_numpy(rows).to(values.device))


def _put(tokens: torch.Tensor, rows: npt.NDArray[np.int64], found: torch.Tensor) -> None:
    tokens.index_copy_(0, torch.from_numpy(rows).to(tokens.device), found)


def _column(values: npt.NDArray[np.float64] | npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)


def _exponents(values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters) -> torch.Tensor:
    """Logarithms of the probabilities as shares of the likeliest token's; fp32, the shape of ``values``."""
    temperature = _column(np.clip(draws.temperature, _TINY, _LARGEST), values).float()
    # The peak is taken off first, so that a tiny temperature does not overflow. An impossible row's is -inf. What has
    # no weight needs no exact exponential, and those of very small numbers take long on CPU.
    return (values - peak.clamp_min(-_LARGEST)).div_(temperature).clamp_min_(LEAST_EXPONENT)


def _weights(shares: torch.Tensor) -> torch.Tensor:
    return (shares * _ONE).to(torch.int64)


def _from_all(values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from all of the vocabulary, and where there was anything to draw; both ``[n]``."""
    vocab = values.shape[1]
    exponents = _exponents(values, peak, draws)
    shares = exponents.exp()
    weights = _weights(shares)
    top_k = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocab), vocab)
    if (top_k < vocab).any():
        trim(values, exponents, weights, torch.ones_like(weights), _column(top_k, values))
    if (draws.top_p < 1.0).any():
        target = share(weights.sum(dim=-1, keepdim=True), _column(draws.top_p, values))
        trim(values, exponents, weights, weights, target)
    if draws.min_p.any():
        weights.mul_(shares >= _column(draws.min_p, values).float())
    return _inverse(weights, draws)


def _from_few(values: torch.Tensor, peak: torch.Tensor, draws: DrawParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_from_all`` gives, for rows with a small ``top_k``, from as many of their likeliest tokens."""
    width = int(draws.top_k.max())
    found, ids = top(values, width)
    ids, by_id = ids.sort(dim=-1)
    shares = _exponents(found, peak, draws).exp_()
    weights = _weights(shares).mul_(torch.arange(width) < _column(draws.top_k, values))
    if (draws.top_p < 1.0).any():
        reached = weights.cumsum(dim=-1)
        weights.mul_(reached - weights < share(reached[:, -1:], _column(draws.top_p, values)))
    if draws.min_p.any():
        weights.mul_(shares >= _column(draws.min_p, values).float())
    index, possible = _inverse(weights.gather(1, by_id), draws)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1), possible


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
