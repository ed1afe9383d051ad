"""Log-probabilities of the prompts themselves, for the sequences that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.plan import NewSequence, StepPlan, TokenLogprobs
from worker.execution.logprobs import PendingLogprobs
from worker.model.decoder import Decoder

SLICE_ROWS: Final = 128
"""Most positions whose logits exist at a time: a row is as long as the vocabulary."""


class _Scored(NamedTuple):
    prompt: list[int]
    top: int


class PromptScores(NamedTuple):
    """Of one span's part of its prompt; on the device until it is read."""

    slices: list[PendingLogprobs]

    def read(self) -> list[TokenLogprobs]:
        """One for each token. Waits for the device."""
        return [found for pending in self.slices for found in pending.read()]


class PromptScorer:
    """Follows the sequences that ask for their prompt's log-probabilities; a step that holds none costs nothing."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Scored] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def follow(self, new: Sequence[NewSequence], retired: Sequence[int]) -> None:
        """Take note of who comes and who goes."""
        for key in retired:
            self._sequences.pop(key, None)
        for sequence in new:
            top = sequence.sampling.prompt_logprobs
            if top is not None:
                self._sequences[sequence.key] = _Scored(sequence.token_ids[: sequence.num_prompt], top)

    def score(
        self, plan: StepPlan, query_start: npt.NDArray[np.int32], hidden: torch.Tensor, model: Decoder
    ) -> dict[int, PromptScores]:
        """By sequence key, for each span that holds positions followed by a token of the prompt: the scores of these
        tokens, ``start + 1`` to ``start + count`` at most.

        ``hidden`` ``[tokens, hidden]``: ``Decoder.forward``'s result; span ``i`` of the plan begins at row
        ``query_start[i]``.
        """
        scores = {}
        for index, span in enumerate(plan.spans):
            scored = self._sequences.get(span.key)
            if scored is None:
                continue
            following = scored.prompt[span.start + 1 : span.start + span.count + 1]
            if following:
                first = int(query_start[index])
                rows = hidden[first : first + len(following)]
                scores[span.key] = PromptScores(_slices(rows, following, scored.top, model))
        return scores


def _slices(hidden: torch.Tensor, following: list[int], top: int, model: Decoder) -> list[PendingLogprobs]:
    token_ids = torch.tensor(following, dtype=torch.int64, device=hidden.device)
    slices = []
    for begin in range(0, len(following), SLICE_ROWS):
        some = slice(begin, begin + SLICE_ROWS)
        slices.append(PendingLogprobs(model.logits(hidden[some]), token_ids[some], [top] * len(token_ids[some])))
    return slices
