"""Quantised weights inside the engine: few forms, into which importers bring every source without loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.gemm import PackedWeight, dequantize, pack, pack_affine


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineInt:
    """A weight ``[rows, columns]`` as integers with a scale, and maybe an offset, for each group of columns.

    ``weight = scale * (code - zero_point) + minimum``, computed in fp32. ``codes`` is uint8 ``[rows, columns * bits /
    8]`` (``kernels.gemm.dequantize`` says how 4-bit codes are packed), ``scale`` and ``minimum`` are fp16 or fp32
    ``[rows, groups]``. A source with signed integers has a ``zero_point`` of half the range; one with a float
    offset has a ``minimum``.
    """

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    zero_point: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits} bits are not supported (4 and 8 are)")
        if self.columns % self.scale.shape[1] or self.codes.shape[0] != self.scale.shape[0]:
            raise ValueError(f"codes {tuple(self.codes.shape)} do not fit scales {tuple(self.scale.shape)}")
        if self.minimum is not None and self.minimum.shape != self.scale.shape:
            raise ValueError(f"minimum {tuple(self.minimum.shape)} does not fit scales {tuple(self.scale.shape)}")

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.columns // self.scale.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight ``[rows, columns]``."""
        return dequantize(self.codes, self.scale, self.minimum, zero_point=self.zero_point, bits=self.bits, dtype=dtype)

    def take_rows(self, rows: torch.Tensor) -> AffineInt:
        """The weight of the rows named by ``rows`` (int64 or int32, ``[n]``), in that order."""
        return AffineInt(
            bits=self.bits,
            codes=self.codes.index_select(0, rows),
            scale=self.scale.index_select(0, rows),
            minimum=None if self.minimum is None else self.minimum.index_select(0, rows),
            zero_point=self.zero_point,
        )

    def to(self, device: torch.device) -> AffineInt:
        return AffineInt(
            bits=self.bits,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            minimum=None if self.minimum is None else self.minimum.to(device),
            zero_point=self.zero_point,
        )

    def pack(self, dtype: torch.dtype) -> PackedWeight:
        """The layout that this weight's device multiplies fastest; activations of ``dtype``."""
        return pack_affine(
            self.codes, self.scale, self.minimum, zero_point=self.zero_point, bits=self.bits, dtype=dtype
        )


Weight = AffineInt | torch.Tensor
"""A weight as it was imported: quantised, or dense floating point."""


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """Weights over the same columns as one, rows after rows; quantised if all are quantised alike."""
    first = weights[0]
    if isinstance(first, AffineInt):
        alike = [
            w
            for w in weights
            if isinstance(w, AffineInt)
            and (w.bits, w.zero_point, w.group_size, w.scale.dtype, w.minimum is None)
            == (first.bits, first.zero_point, first.group_size, first.scale.dtype, first.minimum is None)
        ]
        if len(alike) == len(weights):
            minima = [w.minimum for w in alike if w.minimum is not None]
            return AffineInt(
                bits=first.bits,
                codes=torch.cat([w.codes for w in alike]),
                scale=torch.cat([w.scale for w in alike]),
                minimum=torch.cat(minima) if minima else None,
                zero_point=first.zero_point,
            )
    dense = [w.dequantize() if isinstance(w, AffineInt) else w for w in weights]
    alike_dense = len({w.dtype for w in dense}) == 1
    return torch.cat(dense if alike_dense else [w.to(torch.float32) for w in dense])


def pack_weight(weight: Weight, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    """Move a weight to ``device`` and pack it there."""
    if isinstance(weight, AffineInt):
        return weight.to(device).pack(dtype)
    return pack(weight.to(device, dtype))
