"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from functools import cache

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension, as a new tensor of ``x``'s shape and dtype.

    Each row's result depends on that row alone.
    """
    if x.dtype != torch.float32:
        return torch.rms_norm(x, weight.shape, weight, epsilon)
    # In fp32 torch.rms_norm is several whole passes over x on CPU; this is three.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(epsilon, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(x, scale).mul_(weight)


@cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
