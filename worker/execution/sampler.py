"""Drawing the tokens of one step: greedy rows and sampled rows, each as one vectorised call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kernels.sampling import greedy, sample, uniform
from worker.engine.plan import SamplingParams

_LEAST_TEMPERATURE: Final = torch.finfo(torch.float32).tiny
"""Temperatures below this are no numbers to divide by in fp32: such a draw is greedy."""


def draw(logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """One token for each row of ``logits`` ``[n, vocab]``, to stand at ``positions`` (absolute); int64 ``[n]``."""
    random = [index for index, params in enumerate(sampling) if params.temperature >= _LEAST_TEMPERATURE]
    if not random:
        return greedy(logits)
    device = logits.device
    if len(random) == len(sampling):
        return _draw_random(logits, sampling, positions)
    at = torch.tensor(random, dtype=torch.int64, device=device)
    tokens = greedy(logits)
    tokens[at] = _draw_random(logits[at], [sampling[i] for i in random], [positions[i] for i in random])
    return tokens


def _draw_random(logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    device = logits.device

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device)

    uniforms = uniform(
        integers([params.seed for params in sampling]),
        integers([params.choice for params in sampling]),
        integers(list(positions)),
    )
    temperature = torch.tensor([params.temperature for params in sampling], dtype=torch.float32, device=device)
    top_p = torch.tensor([params.top_p for params in sampling], dtype=torch.float32, device=device)
    return sample(logits, temperature, top_p, uniforms)


def _signed(value: int) -> int:
    """The low 64 bits of any integer, as int64 holds them."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
