"""Rows of logits a few at a time, so that intermediate results stay small and, on CPU, in its caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

_CPU_ELEMENTS: Final = 1 << 19
_DEVICE_ELEMENTS: Final = 1 << 23


def row_slices(logits: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows of ``logits`` ``[n, vocab]``. An int64 for each element of one makes about four
    megabytes on CPU; elsewhere, where only memory is to be saved, 64."""
    count, vocab = logits.shape
    step = max(1, (_CPU_ELEMENTS if logits.is_cpu else _DEVICE_ELEMENTS) // vocab)
    return (slice(begin, begin + step) for begin in range(0, count, step))
