"""Import a model from wherever it is, whatever its format."""

from __future__ import annotations

from pathlib import Path

from worker.model.weights import DecoderWeights
from worker.weights import gguf_import, safetensors


def load_decoder(path: Path) -> DecoderWeights:
    """The weights in a GGUF file, or in a Hugging Face folder of ``config.json`` and ``*.safetensors``.

    Raises ``ValueError`` (``GGUFError`` or ``CheckpointError``) if they can't be loaded, ``OSError`` if a file can't be
    read.
    """
    return safetensors.load_decoder(path) if path.is_dir() else gguf_import.load_decoder(path)
