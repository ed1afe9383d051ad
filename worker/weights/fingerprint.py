"""A short name for a model's weights that differs when the weights do."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_HEAD_BYTES: Final = 4 << 20
"""Read whole from each file's beginning: names, shapes and metadata are there."""

_SAMPLES: Final = 4096
_SAMPLE_BYTES: Final = 4096


def weights_digest(path: Path) -> bytes:
    """SHA-256 over a weights file, or over those of a folder and its ``config.json``, by size and samples.

    Each file gives its size, its first 4 MiB and 4,096 pieces of 4 KiB, evenly spread to the end, so a fine-tuned or
    re-quantised copy has another digest, wherever it lies; files of up to 20 MiB are read whole. It costs some
    milliseconds for a file in memory. It tells copies apart, and is no proof against a forger. Raises ``OSError``.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(f"{size}:".encode())
        if path.is_dir():
            digest.update(f"{file.name}:".encode())
        with file.open("rb") as opened:
            if size <= _HEAD_BYTES + _SAMPLES * _SAMPLE_BYTES:
                digest.update(opened.read())
                continue
            digest.update(opened.read(_HEAD_BYTES))
            room = size - _HEAD_BYTES - _SAMPLE_BYTES
            for sample in range(_SAMPLES):
                offset = _HEAD_BYTES + room * sample // (_SAMPLES - 1)
                digest.update(os.pread(opened.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    wanted = (file for file in path.iterdir() if file.suffix in (".gguf", ".safetensors") or file.name == "config.json")
    return sorted(wanted)
