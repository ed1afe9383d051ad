"""Rotary position embedding (Su et al., 2021) on interleaved pairs.

Dimensions ``2i`` and ``2i + 1`` of a head form the pair that is turned by ``position * base ** (-2i / head_dim)``. A
checkpoint that pairs ``i`` with ``i + head_dim / 2`` is brought to this order when it is loaded, by permuting the rows
of its query and key projections: dot products do not change, and one complex product turns everything.
"""

from __future__ import annotations

import torch


def rotation_table(length: int, head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Unit rotations for positions ``0 .. length - 1``: complex64 ``[length, head_dim / 2]``.

    Angles are computed in float64: at position 8,000 float32 would be off by 5e-4.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), base**-exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Turn ``heads`` in place.

    ``heads``: ``[tokens, heads, head_dim]``, last dimension contiguous; fp32 or a 16-bit type.
    ``rotations``: complex64 ``[tokens, head_dim / 2]``, the rows of ``rotation_table`` at the tokens' positions.
    """
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations.unsqueeze(1))
    else:
        turned = torch.view_as_complex(pairs.to(torch.float32)).mul_(rotations.unsqueeze(1))
        pairs.copy_(torch.view_as_real(turned))
