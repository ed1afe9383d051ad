"""Matrix products of activations with a model's weights.

A weight is packed once, when it is loaded, into the layout that the device multiplies fastest; ``linear`` then takes
that pack. On CPU the pack is a blocked fp32 layout of oneDNN or MKL (up to twice as fast as a plain fp32 product at
small batches); on other devices quantised weights stay quantised and are expanded by each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import torch

_PACK_ROWS: Final = 64
"""Batch size that packed layouts are chosen for. MKL's layout for it is as fast as any for 1 to 32 rows (up to 40%
faster at 32 than its layouts for fewer) and for hundreds. Fixed: the layout may decide the order of the sums."""

_PROBE_ROWS: Final = 32
_MAX_ROW_FLOOR: Final = 8
_TOLERANCE: Final = 1e-3


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
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return DenseWeight(weight)
    if torch.backends.mkl.is_available() and _made_by_intel():  # type: ignore[no-untyped-call]
        packed = CPUWeight("mkl", weight)
        if packed.is_exact:
            return packed
    return CPUWeight("onednn", weight)


@cache
def _made_by_intel() -> bool:
    """Whether this is an Intel CPU: MKL's products are the faster ones there, oneDNN's elsewhere (by a third for a
    decode of 8 sequences on an AMD EPYC of the Zen 4 kind)."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


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


class CPUWeight:
    """A weight packed for exact and fast fp32 products on CPU, by oneDNN or by MKL.

    A library may sum in another order for a very small batch than for larger ones (oneDNN: one row, long columns). The
    smallest batch that agrees with larger ones is measured once for each shape, and smaller batches are padded to it.
    ``is_exact`` is False if there is none (MKL: many rows, without AVX-512), or the products are wrong.
    """

    def __init__(self, library: str, weight: torch.Tensor) -> None:
        self.rows, self.columns = weight.shape
        self._product = _PACKERS[library](weight)
        shape = (library, self.rows, self.columns)
        if shape not in _row_floors:
            _row_floors[shape] = _row_floor(self._product, weight)
        self._row_floor = _row_floors[shape]
        self.is_exact = self._row_floor > 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count >= self._row_floor:
            return self._product(x)
        padded = x.new_zeros(self._row_floor, self.columns)
        padded[:count] = x
        return self._product(padded)[:count]


_Product = Callable[[torch.Tensor], torch.Tensor]


def _pack_onednn(weight: torch.Tensor) -> _Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.float32).contiguous(), _PACK_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, None, "none", [], "")
        return result

    return product


def _pack_mkl(weight: torch.Tensor) -> _Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.to(torch.float32).contiguous(), _PACK_ROWS)
    # Only its shape is read: the plain weight need not be kept.
    shape = torch.zeros(1).expand(weight.shape)
    multiply = torch.ops.mkl._mkl_linear.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, shape, None, x.shape[0])
        return result

    return product


_PACKERS: Final[dict[str, Callable[[torch.Tensor], _Product]]] = {"onednn": _pack_onednn, "mkl": _pack_mkl}


_row_floors: dict[tuple[str, int, int], int] = {}
"""``_row_floor`` for each library, rows and columns."""


def _row_floor(product: _Product, weight: torch.Tensor) -> int:
    """The smallest batch from which on each row's product is bitwise that of a large batch; 0 if the library's products
    are wrong or never settle, as a pack used with another number of rows than it was made for might be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator)
    expected = product(x)
    exact = torch.nn.functional.linear(x, weight.to(torch.float32))
    if not torch.allclose(expected, exact, rtol=0, atol=_TOLERANCE * max(1.0, float(exact.abs().max()))):
        return 0
    floor = _MAX_ROW_FLOOR + 1
    if not all(torch.equal(product(x[:count].contiguous()), expected[:count]) for count in range(floor, _PROBE_ROWS)):
        return 0
    while floor > 1 and torch.equal(product(x[: floor - 1].contiguous()), expected[: floor - 1]):
        floor -= 1
    return floor if floor <= _MAX_ROW_FLOOR else 0
