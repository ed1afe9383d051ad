"""A decoder-only transformer with pre-normalisation, rotary attention and gated MLPs (the Llama family)."""

from __future__ import annotations

import torch

from kernels.gemm import linear
from kernels.rope import rotation_table
from worker.model.cache_groups import CacheLayout
from worker.model.config import DecoderConfig
from worker.model.layers import Attention, Embedding, GatedMLP, RMSNorm, StepContext
from worker.model.quantization import AffineInt, pack_weight
from worker.model.weights import DecoderWeights


class _Layer:
    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, residual: torch.Tensor, context: StepContext) -> None:
        """Advance ``residual`` ``[tokens, hidden]`` in place."""
        residual.add_(self._attention(self._attention_norm(residual), context))
        residual.add_(self._mlp(self._mlp_norm(residual)))


class Decoder:
    """The model on one device. ``rotations``: complex64 ``[max_length, head_dim / 2]``. ``layout`` says where each
    layer keeps its keys and values."""

    def __init__(
        self,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        layout: CacheLayout,
    ) -> None:
        config = weights.config
        self.config: DecoderConfig = config
        self.layout = layout
        places = layout.places

        def norm(weight: torch.Tensor) -> RMSNorm:
            return RMSNorm(weight.to(device, dtype), config.norm_epsilon)

        embedding = weights.embedding
        if isinstance(embedding, AffineInt):
            self._embedding = Embedding(embedding.to(device), dtype)
        else:
            self._embedding = Embedding(embedding.to(device, dtype), dtype)
        self._layers = [
            _Layer(
                norm(layer.attention_norm),
                Attention(
                    pack_weight(layer.qkv, device, dtype),
                    None if layer.qkv_bias is None else layer.qkv_bias.to(device, dtype),
                    pack_weight(layer.attention_output, device, dtype),
                    config,
                    places[index],
                ),
                norm(layer.mlp_norm),
                GatedMLP(pack_weight(layer.gate_up, device, dtype), pack_weight(layer.down, device, dtype)),
            )
            for index, layer in enumerate(weights.layers)
        ]
        self._norm = norm(weights.norm)
        self._head = pack_weight(weights.embedding if weights.head is None else weights.head, device, dtype)
        self.rotations = rotation_table(max_length, config.head_dim, config.rope_base, device)

    def forward(self, token_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Hidden states ``[tokens, hidden]`` after the last layer, before the final norm; writes the tokens' KV."""
        residual = self._embedding(token_ids)
        for layer in self._layers:
            layer(residual, context)
        return residual

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of ``forward``'s result after the final norm, ``[rows, hidden]``: what an embedding is made of."""
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` for rows of ``forward``'s result."""
        return linear(self._norm(hidden), self._head)
