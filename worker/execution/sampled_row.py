"""What the sampler needs to know of a sequence: once for its life, and for each draw."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.plan import SamplingParams

LEAST_TEMPERATURE: Final = torch.finfo(torch.float32).tiny
"""Temperatures below this are no numbers to divide by in fp32: such a draw is greedy."""


class SequenceSampling:
    """A sequence's parameters, taken apart once. ``num_prompt``: how many of its tokens are prompt."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self.params = params
        self.num_prompt = num_prompt
        self.random = params.temperature >= LEAST_TEMPERATURE
        self.penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self.stop_ids = np.array(params.stop_token_ids, np.int64)
        self._shaped = self.penalised or bool(params.logit_bias) or params.allowed_token_ids is not None
        self._stops_from = num_prompt + (params.min_tokens if params.stop_token_ids else 0)
        self._allowed: npt.NDArray[np.int32] | None = None

    def bans_stops(self, position: int) -> bool:
        """Whether the token at ``position`` must not be a stop token."""
        return position < self._stops_from

    def is_shaped(self, position: int) -> bool:
        """Whether anything but a grammar changes the logits of the token at ``position``."""
        return self._shaped or position < self._stops_from

    def allowed_bits(self, vocab_size: int) -> npt.NDArray[np.int32] | None:
        """``allowed_token_ids`` as ``TokenMasks`` has its bits, int32 ``[ceil(vocab_size / 32)]``; None: all are."""
        ids = self.params.allowed_token_ids
        if ids is None:
            return None
        if self._allowed is None:
            bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
            bits[[token for token in ids if 0 <= token < vocab_size]] = 1
            self._allowed = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        return self._allowed


class SampledRow(NamedTuple):
    """One row of a step's logits: the token to be drawn from it stands at ``position`` of its sequence, whose tokens
    are ``held_row`` of the sequence table's ``token_ids``."""

    sequence: SequenceSampling
    position: int
    held_row: int
