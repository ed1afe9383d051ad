"""Architectures by name."""

from __future__ import annotations

from typing import Final

import torch

from worker.model.cache_groups import CacheLayout, cache_layout
from worker.model.decoder import Decoder
from worker.model.weights import DecoderWeights

ARCHITECTURES: Final[dict[str, type[Decoder]]] = {"llama": Decoder, "mistral": Decoder, "qwen2": Decoder}
"""The class that runs each architecture, by the name that its importer gives."""


def build_model(
    weights: DecoderWeights,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    layout: CacheLayout | None = None,
) -> Decoder:
    """The model on ``device``, for sequences of up to ``max_length`` tokens, with its KV cache laid out as ``layout``
    says (None: as the model's own windows want it). Raises ``ValueError`` for an architecture that nothing here runs.
    """
    name = weights.config.architecture
    try:
        architecture = ARCHITECTURES[name]
    except KeyError:
        raise ValueError(f"architecture {name!r} is not supported ({', '.join(sorted(ARCHITECTURES))} are)") from None
    return architecture(weights, device, dtype, max_length, layout or cache_layout(weights.config))
