"""The parts of a decoder layer. Each holds its packed weights and calls the kernels; none knows the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.activation import silu_and_multiply
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan
from kernels.cache import PagedCache, write_kv
from kernels.gemm import PackedWeight, linear
from kernels.norm import rms_norm
from kernels.rope import rotate_
from worker.model.config import DecoderConfig
from worker.model.quantization import AffineInt, Weight


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What the layers of one cache group share in a step."""

    attention: AttentionPlan
    slot_index: torch.Tensor
    """Where the new keys and values go: ``PagedCache.slot_index`` of the step's slots in this group."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of one step shares."""

    cache: PagedCache
    groups: list[GroupContext]
    """One for each group of the model's ``CacheLayout``."""
    rotations: torch.Tensor
    """complex64 ``[tokens, head_dim / 2]``: rows of the rotation table at the step's positions."""


class RMSNorm:
    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, self._epsilon)


class Embedding:
    """Token vectors; a quantised table stays so, and only the rows looked up are expanded."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` int32 or int64 to a new ``[tokens, hidden]``."""
        if isinstance(self._weight, AffineInt):
            return self._weight.take_rows(token_ids).dequantize(self._dtype)
        return self._weight.index_select(0, token_ids).to(self._dtype)


class Attention:
    """Grouped-query attention with fused query, key and value projection. The residual is added by the caller.

    ``place``: the layer's cache group, and its index in that group's pages.
    """

    def __init__(
        self,
        qkv: PackedWeight,
        bias: torch.Tensor | None,
        output: PackedWeight,
        config: DecoderConfig,
        place: tuple[int, int],
    ) -> None:
        self._qkv = qkv
        self._bias = bias
        self._output = output
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._group, self._layer = place

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        projected = linear(x, self._qkv)
        if self._bias is not None:
            projected.add_(self._bias)
        heads = projected.view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        rotate_(heads[:, : self._heads + self._kv_heads], context.rotations)
        query, kv = heads[:, : self._heads], heads[:, self._heads :]
        group = context.groups[self._group]
        write_kv(context.cache, self._layer, group.slot_index, kv)
        attended = paged_attention(query, kv, context.cache, self._layer, group.attention)
        return linear(attended, self._output)


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up as one product."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(silu_and_multiply(linear(x, self._gate_up)), self._down)
