"""Rows of logits a few at a time, where intermediate results should stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

_CPU_ELEMENTS: Final = 1 << 17


def row_slices(logits: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows of ``logits`` ``[n, vocab]``: on CPU as many as make about a megabyte of integers,
    elsewhere all at once."""
    count, vocab = logits.shape
    step = max(1, _CPU_ELEMENTS // vocab) if logits.is_cpu else max(1, count)
    return (slice(begin, begin + step) for begin in range(0, count, step))
