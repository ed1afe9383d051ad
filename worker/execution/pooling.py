"""Embeddings: one vector for a whole sequence, from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.readback import Readback
from worker.engine.plan import NewSequence, Pooling, StepPlan
from worker.model.decoder import Decoder


@dataclass(slots=True)
class _Pooled:
    pooling: Pooling
    length: int
    """Tokens of the sequence."""
    total: torch.Tensor | None = None
    """fp32 ``[hidden]``: the sum over the tokens so far, for the mean."""
    summed: int = 0


class Pooler:
    """Follows the sequences that are to become vectors; a step that holds none costs nothing."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Pooled] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def follow(self, new: Sequence[NewSequence], retired: Sequence[int]) -> None:
        """Take note of who comes and who goes."""
        for key in retired:
            self._sequences.pop(key, None)
        for sequence in new:
            if sequence.pooling is not None:
                self._sequences[sequence.key] = _Pooled(sequence.pooling, len(sequence.token_ids))

    def pool(
        self, plan: StepPlan, query_start: npt.NDArray[np.int32], hidden: torch.Tensor, model: Decoder
    ) -> dict[int, Readback]:
        """The vectors that a step completes, by sequence key: fp32 ``[hidden]``.

        ``hidden`` ``[tokens, hidden]``: ``Decoder.forward``'s result, before the final norm; span ``i`` of the plan
        begins at row ``query_start[i]``. Raises ``ValueError`` if a mean would leave tokens out: its sequence must be
        computed from its first token on.
        """
        vectors = {}
        for index, span in enumerate(plan.spans):
            pooled = self._sequences.get(span.key)
            if pooled is None:
                continue
            end = span.start + span.count
            first, last = int(query_start[index]), int(query_start[index + 1])
            if pooled.pooling == "last":
                if end == pooled.length:
                    vectors[span.key] = Readback(model.normalize(hidden[last - 1 : last])[0].to(torch.float32))
                continue
            if span.start != pooled.summed:
                raise ValueError(f"sequence {span.key} pools a mean, but token {pooled.summed} is not the span's first")
            added = model.normalize(hidden[first:last]).sum(dim=0, dtype=torch.float32)
            pooled.total = added if pooled.total is None else pooled.total + added
            pooled.summed = end
            if end == pooled.length:
                vectors[span.key] = Readback(pooled.total / pooled.length)
        return vectors
