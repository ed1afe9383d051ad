"""Where the model comes from: loaded at the start, and again when a sleeping engine wakes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from kernels.device import compute_dtype
from worker.engine.config import EngineConfig
from worker.execution.memory import check_length
from worker.model.cache_groups import CacheLayout, cache_layout
from worker.model.config import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.registry import build_model
from worker.model.weights import DecoderWeights
from worker.weights.fingerprint import weights_digest
from worker.weights.loading import load_decoder


class ModelSource:
    """Builds the model from its file or folder, as often as it is wanted."""

    def __init__(self, config: EngineConfig, device: torch.device, block_size: int) -> None:
        self._path = Path(config.model_path)
        self._config = config
        self._device = device
        self._block_size = block_size
        self._kept: DecoderWeights | Decoder | None = None
        self._fingerprint: str | None = None
        self._digest: bytes | None = None

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over architecture and weights of the model that was built. Equal names mean equal KV."""
        if self._fingerprint is None:
            raise RuntimeError("no model was built yet")
        return self._fingerprint

    def build(self) -> Decoder:
        """The model on its device; what is kept is kept until ``drop``. Raises ``ValueError`` or ``OSError`` if it
        can't be loaded or is another than it was before."""
        if isinstance(self._kept, Decoder):
            return self._kept
        weights = self._kept or self._load()
        longest = max_model_len(self._config, weights.config)
        check_length(longest, weights.config, self._device)
        dtype = compute_dtype(self._device)
        return build_model(weights, self._device, dtype, longest, self._layout(weights.config))

    def keep(self, model: Decoder) -> None:
        """Keep the weights in host memory, so that the next ``build`` needs no file; the caller lets go of ``model``.

        On CPU they are there, ready to run. From another device none comes back: they are imported from the file once
        more, in their quantised form. Raises as ``build`` does.
        """
        self._kept = model if self._device.type == "cpu" else self._load()

    def drop(self) -> None:
        """Keep nothing."""
        self._kept = None

    def _layout(self, shape: DecoderConfig) -> CacheLayout:
        return cache_layout(shape, self._config.attention_window, self._config.attention_sinks, self._block_size)

    def _load(self) -> DecoderWeights:
        # Before the weights are read, which may take minutes.
        digest = weights_digest(self._path)
        if self._digest not in (None, digest):
            raise ValueError(self._changed)
        weights = load_decoder(self._path)
        # What a token sees decides what the keys and values after it are.
        described = msgspec.json.encode((weights.config, self._layout(weights.config)))
        fingerprint = hashlib.sha256(described + digest).hexdigest()
        if self._fingerprint not in (None, fingerprint):
            raise ValueError(self._changed)
        self._fingerprint, self._digest = fingerprint, digest
        return weights

    @property
    def _changed(self) -> str:
        return f"{self._path} has changed since the engine started; start it anew to serve what is there"


def max_model_len(config: EngineConfig, shape: DecoderConfig) -> int:
    """Most tokens of one sequence. Raises ``ValueError`` if more is asked for than the model takes."""
    if config.max_model_len is not None and not 1 <= config.max_model_len <= shape.context_length:
        raise ValueError(f"max_model_len is {config.max_model_len}; the model takes 1 to {shape.context_length}")
    return config.max_model_len or shape.context_length
