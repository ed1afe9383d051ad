"""The paged KV cache: its layout and the writing of new keys and values.

A block is one contiguous page ``[layers, 2 (keys, values), KV heads, block size, head dim]``, so that it moves between
tiers and peers as one piece and any slice of its heads is contiguous in each layer.
"""

from __future__ import annotations

import math

import numpy as np
import torch


class PagedCache:
    """The pool of pages: ``pages`` ``[blocks, layers, 2, KV heads, block size, head dim]``.

    ``slot_rows(layer)`` and ``block_rows(layer)`` view the same memory as rows of one head's vector at one slot
    ``[*, head_dim]`` and of one head's whole block ``[*, block_size * head_dim]``, beginning at that layer: an index
    that is right for layer 0 is right in each layer's view, so a step computes its indices once.
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
        slots = self.pages.view(-1, head_dim)
        blocks = self.pages.view(-1, block_size * head_dim)
        stride = 2 * num_kv_heads
        self._slot_rows = [slots[layer * stride * block_size :] for layer in range(num_layers)]
        self._block_rows = [blocks[layer * stride :] for layer in range(num_layers)]

    def slot_rows(self, layer: int) -> torch.Tensor:
        return self._slot_rows[layer]

    def block_rows(self, layer: int) -> torch.Tensor:
        return self._block_rows[layer]

    def block_index(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``block_rows`` for ``block_ids`` (int64, any shape ``[...]``): ``[..., 2, KV heads]``."""
        heads = torch.arange(2 * self.num_kv_heads, device=block_ids.device).view(2, self.num_kv_heads)
        return (block_ids * (self.num_layers * 2 * self.num_kv_heads))[..., None, None] + heads

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``slot_rows`` for ``slots`` (int64 ``[tokens]``, block id * block size + offset): ``[tokens, 2 * KV
        heads]``."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return self.block_index(blocks).flatten(1) * self.block_size + offsets.unsqueeze(1)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on CPU that take memory only where they are written: the system gives untouched pages as zeros.

    ``torch.zeros`` writes them all, which costs a second for each 2 GiB.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def page_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


def write_kv(cache: PagedCache, layer: int, slot_index: torch.Tensor, kv: torch.Tensor) -> None:
    """Store ``kv`` ``[tokens, 2 * KV heads, head_dim]`` (keys, then values) at ``PagedCache.slot_index`` rows."""
    cache.slot_rows(layer).index_put_((slot_index,), kv)
