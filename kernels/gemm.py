"""Matrix products of activations with a model's weights.

A weight is packed once, when it is loaded, into the layout that the device multiplies fastest; ``linear`` then takes
that pack. On CPU the pack is oneDNN's blocked fp32 layout (about twice as fast as a plain fp32 product at small
batches); on other devices quantised weights stay quantised and are expanded by each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol

import torch

_PACK_ROWS: Final = 16
"""Batch size that the oneDNN layout is chosen for. Fixed, and not below 8: the layout decides the order of the sums."""

_PROBE_ROWS: Final = 32
_MAX_ROW_FLOOR: Final = 8


class PackedWeight(Protocol):
    """A weight ``[rows, columns]`` in a device's own layout."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for ``x`` of shape ``[n, columns]``."""
        ...


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``x @ weight.T``: ``[n, columns]`` to a new ``[n, rows]``.

    On CPU a row of the result depends on its row of ``x`` alone, bit for bit, however many rows come with it.
    """
    return weight.multiply(x)


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a dense floating-point weight ``[rows, columns]`` on the device where it is."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return OneDNNWeight(weight)
    return DenseWeight(weight)


def pack_affine(
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    *,
    zero_point: int,
    bits: int,
    dtype: torch.dtype,
) -> PackedWeight:
    """Pack a group-wise affine weight (see ``dequantize``): expanded once on CPU, kept as it is elsewhere."""
    if codes.device.type == "cpu":
        return pack(dequantize(codes, scale, minimum, zero_point=zero_point, bits=bits, dtype=torch.float32))
    return AffineWeight(codes, scale, minimum, zero_point, bits, dtype)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    *,
    zero_point: int,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Expand ``scale * (code - zero_point) + minimum``, computed in fp32, to ``[rows, columns]`` of ``dtype``.

    ``codes`` is uint8 ``[rows, columns * bits / 8]``: whole bytes for 8 bits; for 4 bits, in a group of ``g`` columns,
    byte ``i`` holds column ``i`` in its low half and column ``i + g / 2`` in its high half. ``scale`` and ``minimum``
    are ``[rows, groups]``.
    """
    rows, groups = scale.shape
    grouped = codes.reshape(rows, groups, -1)
    if bits == 4:
        values = torch.empty(rows, groups, 2, grouped.shape[2], dtype=torch.float32, device=codes.device)
        values[:, :, 0].copy_(grouped & 15)
        values[:, :, 1].copy_(grouped >> 4)
        values = values.flatten(2)
    elif bits == 8:
        values = grouped.to(torch.float32)
    else:
        raise ValueError(f"{bits} bits are not supported (4 and 8 are)")
    if zero_point:
        values.sub_(zero_point)
    values.mul_(scale.to(torch.float32).unsqueeze(-1))
    if minimum is not None:
        values.add_(minimum.to(torch.float32).unsqueeze(-1))
    return values.view(rows, -1).to(dtype)


class DenseWeight:
    """A weight kept as a plain matrix: any device."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.rows, self.columns = weight.shape
        self._weight = weight

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight)


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """A quantised weight, expanded to ``dtype`` by each product: the reference that works on any device."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    zero_point: int
    bits: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantize(
            self.codes, self.scale, self.minimum, zero_point=self.zero_point, bits=self.bits, dtype=self.dtype
        )
        return torch.nn.functional.linear(x, weight)


class OneDNNWeight:
    """A weight in oneDNN's blocked fp32 layout, for exact and fast products on CPU.

    oneDNN may sum in another order for a very small batch (one row, long columns) than for larger ones. The smallest
    batch that agrees with larger ones is measured once for each shape, and smaller batches are padded to it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.rows, self.columns = weight.shape
        self._packed = _reorder(weight)
        self._row_floor = _row_floor(self.rows, self.columns)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count >= self._row_floor:
            return _product(x, self._packed)
        padded = x.new_zeros(self._row_floor, self.columns)
        padded[:count] = x
        return _product(padded, self._packed)[:count]


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.float32).contiguous(), _PACK_ROWS)
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return result


@cache
def _row_floor(rows: int, columns: int) -> int:
    """The smallest batch from which on each row's product is bitwise that of a large batch."""
    generator = torch.Generator().manual_seed(0)
    packed = _reorder(torch.randn(min(rows, 4096), columns, generator=generator))
    x = torch.randn(_PROBE_ROWS, columns, generator=generator)
    expected = _product(x, packed)
    floor = _MAX_ROW_FLOOR
    while floor > 1 and torch.equal(_product(x[: floor - 1].contiguous(), packed), expected[: floor - 1]):
        floor -= 1
    return floor
