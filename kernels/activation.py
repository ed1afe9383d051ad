"""The gate of a gated MLP (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

import torch


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up`` = ``[gate | up]``: ``[n, 2 * width]`` to a new, contiguous ``[n, width]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
