"""A model's weights after import and before packing: what importers give and models take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.model.config import DecoderConfig
from worker.model.quantization import Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Query and key rows pair for rotation as ``kernels.rope`` wants them: next to each other."""

    attention_norm: torch.Tensor
    qkv: Weight
    attention_output: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    qkv_bias: torch.Tensor | None = None
    """``[query size + 2 * KV size]``, its rows in the order of ``qkv``'s."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, on CPU. ``head`` is None if the embedding serves as head too."""

    config: DecoderConfig
    embedding: Weight
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: Weight | None
