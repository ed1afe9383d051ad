"""The paged KV cache: its layout and the writing of new keys and values.

A block is one contiguous page ``[layers, 2 (keys, values), KV heads, block size, head dim]``, so that it moves between
tiers and peers as one piece and any slice of its heads is contiguous in each layer. The layers of a page are those that
share a block table (a cache group); where a model has several groups, any block serves any of them, a page has room for
the largest, and ``layer`` below is a layer's index in its group.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

_MAX_GRAIN: Final = 32
_ALIGNMENT: Final = 64
"""Bytes. Products may be summed in another order for pages that are aligned otherwise than torch's own tensors."""


class PagedCache:
    """The pool of pages: ``pages`` ``[blocks, layers, 2, KV heads, block size, head dim]``.

    ``slot_rows(layer)`` and ``grain_rows(layer)`` view the same memory as rows of one head's vector at one slot
    ``[*, head_dim]`` and at ``grain`` slots of a block ``[*, grain * head_dim]``, beginning at that layer: an index
    that is right for layer 0 is right in each layer's view, so a step computes its indices once. ``grain`` divides the
    block size.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        # Zeroed: what is masked out of attention is still multiplied by zero, and must be finite.
        self.pages = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.grain = math.gcd(block_size, _MAX_GRAIN)
        self._grains = block_size // self.grain
        slots = self.pages.view(-1, head_dim)
        grains = self.pages.view(-1, self.grain * head_dim)
        stride = 2 * num_kv_heads
        self._slot_rows = [slots[layer * stride * block_size :] for layer in range(num_layers)]
        self._grain_rows = [grains[layer * stride * self._grains :] for layer in range(num_layers)]

    def slot_rows(self, layer: int) -> torch.Tensor:
        return self._slot_rows[layer]

    def grain_rows(self, layer: int) -> torch.Tensor:
        return self._grain_rows[layer]

    def block_range(self, layer: int, first: int, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``width`` slots of ``count`` blocks from ``first`` on, as they lie in the pool:
        views ``[count, KV heads, width, head_dim]``."""
        block, at_layer, part, head, slot, dim = self.pages.stride()
        size, stride = (count, self.num_kv_heads, width, self.head_dim), (block, head, slot, dim)
        keys = first * block + layer * at_layer
        return self.pages.as_strided(size, stride, keys), self.pages.as_strided(size, stride, keys + part)

    def grain_index(self, block_ids: torch.Tensor, grains: torch.Tensor) -> torch.Tensor:
        """Rows of ``grain_rows`` for ``grains`` of ``block_ids``, counted from each block's beginning: both int64
        ``[..., n]``, to ``[..., 2, KV heads, n]``."""
        heads = torch.arange(2 * self.num_kv_heads, device=block_ids.device).view(2, self.num_kv_heads, 1)
        first = block_ids * (self.num_layers * 2 * self.num_kv_heads * self._grains) + grains
        return first[..., None, None, :] + heads * self._grains

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``slot_rows`` for ``slots`` (int64 ``[tokens]``, block id * block size + offset): ``[tokens, 2 * KV
        heads]``."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        heads = torch.arange(2 * self.num_kv_heads, device=slots.device)
        first = blocks * (self.num_layers * 2 * self.num_kv_heads)
        return (first.unsqueeze(1) + heads) * self.block_size + offsets.unsqueeze(1)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on CPU that take memory only where they are written: the system gives untouched pages as zeros.

    ``torch.zeros`` writes them all, which costs a second for each 2 GiB.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)


def page_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block with room for ``num_layers`` layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


def write_kv(cache: PagedCache, layer: int, slot_index: torch.Tensor, kv: torch.Tensor) -> None:
    """Store ``kv`` ``[tokens, 2 * KV heads, head_dim]`` (keys, then values) at ``PagedCache.slot_index`` rows."""
    cache.slot_rows(layer).index_put_((slot_index,), kv)
