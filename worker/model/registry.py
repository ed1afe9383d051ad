"""Architectures by name."""

from __future__ import annotations

from typing import Final

import torch

from worker.model.decoder import Decoder
from worker.model.weights import DecoderWeights

ARCHITECTURES: Final[dict[str, type[Decoder]]] = {"llama": Decoder}
"""The class that runs each architecture, by the name that its importer gives."""


def build_model(weights: DecoderWeights, device: torch.device, dtype: torch.dtype, max_length: int) -> Decoder:
    """The model on ``device``, for sequences of up to ``max_length`` tokens. Raises ``ValueError`` for an architecture
    that nothing here runs."""
    name = weights.config.architecture
    try:
        architecture = ARCHITECTURES[name]
    except KeyError:
        raise ValueError(f"architecture {name!r} is not supported ({', '.join(sorted(ARCHITECTURES))} is)") from None
    return architecture(weights, device, dtype, max_length)
