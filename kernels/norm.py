"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, as a new tensor of ``x``'s shape and dtype.

    Each row's result depends on that row alone.
    """
    return torch.rms_norm(x, weight.shape, weight, epsilon)
