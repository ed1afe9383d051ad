"""Drawing the next token from logits, reproducibly.

A draw is one uniform number per (seed, choice, absolute position) from the counter-based generator Philox 4x32-10
(Salmon et al., SC 2011), put through the inverse of the cumulative distribution. It does not depend on the batch, on
chunking or on what was drawn before.
"""

from __future__ import annotations

from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def philox(
    seed: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit random words (held in int64) for each element of ``seed`` (int64; its 64 bits are the key) and
    ``counter`` (four int64 tensors of 32-bit words)."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # The 64-bit product wraps in int64, which keeps its bits; the mask undoes the arithmetic shift.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A float64 in [0, 1) with 53 random bits for each (seed, choice, position); all int64 ``[n]``."""
    zero = torch.zeros_like(position)
    high, low, _, _ = philox(seed, (position & _MASK, choice & _MASK, (position >> 32) & _MASK, zero))
    return ((high >> 5) * 67108864 + (low >> 6)).to(torch.float64) / 9007199254740992.0


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest logit; the first of equals, and NaN never wins. ``[n, vocab]`` to ``[n]``."""
    best, index = logits.max(dim=-1)
    if bool(best.isnan().any()):
        index = torch.where(logits.isnan(), float("-inf"), logits).argmax(dim=-1)
    return index


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Draw one token for each row.

    ``logits`` ``[n, vocab]``; ``temperature`` (> 0; brought into the normal range of fp32) and ``top_p`` (in (0, 1])
    fp32 ``[n]``; ``uniforms`` float64 ``[n]``. The nucleus is the smallest set of likeliest tokens whose probability
    reaches ``top_p`` (Holtzman et al., 2020). A NaN counts as impossible; a row without any finite logit gives token 0.
    Returns int64 ``[n]``.
    """
    finite = torch.nan_to_num(logits.to(torch.float32), nan=float("-inf"))
    # The peak is taken off first, so that a tiny temperature does not overflow.
    divisor = temperature.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max).unsqueeze(1)
    scaled = (finite - finite.amax(dim=-1, keepdim=True)) / divisor
    probabilities = torch.nan_to_num(torch.softmax(scaled, dim=-1), nan=0.0)
    result = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    whole = top_p >= 1.0
    if bool(whole.any()):
        result[whole] = _inverse(probabilities[whole], uniforms[whole])
    if not bool(whole.all()):
        part = ~whole
        ordered, order = probabilities[part].sort(dim=-1, descending=True, stable=True)
        before = ordered.to(torch.float64).cumsum(dim=-1) - ordered
        kept = torch.where(before < top_p[part].to(torch.float64).unsqueeze(1), ordered, 0.0)
        rank = _inverse(kept, uniforms[part])
        result[part] = order.gather(1, rank.unsqueeze(1)).squeeze(1)
    return result


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds ``uniform * total``; never one of weight zero, if any is not."""
    cumulative = weights.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * total, right=True).squeeze(1)
    # Rounding may carry the product up to the total itself: then the last token of any weight is meant.
    last = torch.searchsorted(cumulative, total, right=False).squeeze(1)
    return torch.minimum(index, last)
