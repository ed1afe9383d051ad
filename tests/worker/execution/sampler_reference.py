"""What the sampler does to one row, written out slowly in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.philox import uniform
from tests.kernels.sampling_reference import Choice, drawn, probabilities
from worker.engine.plan import SamplingParams, TokenMasks
from worker.execution.sampled_row import SampledRow, SequenceSampling
from worker.execution.sampler import Draws, Sampler


@dataclass
class Row:
    """A row of a batch: its raw logits, its parameters, the tokens before it, and what its grammar allows."""

    logits: list[float]
    params: SamplingParams
    held: list[int] = field(default_factory=lambda: [0])
    num_prompt: int = 1
    grammar: set[int] | None = None


def draw(rows: list[Row], vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> Draws:
    """By the sampler, in one batch. Checks that it leaves the logits alone."""
    logits = torch.tensor([row.logits for row in rows])
    before = logits.clone()
    held = torch.full((len(rows) + 1, 1 + max(len(row.held) for row in rows)), 1, dtype=torch.int32)
    sampled = []
    for index, row in enumerate(rows):
        # Not in the order of the batch.
        at = len(rows) - index
        held[at, : len(row.held)] = torch.tensor(row.held, dtype=torch.int32)
        sampled.append(SampledRow(SequenceSampling(row.params, row.num_prompt), len(row.held), at))
    vocab = logits.shape[1] if vocab_size is None else vocab_size
    draws = Sampler(vocab, torch.device("cpu"), eos_token_ids).draw(logits, sampled, held, masks_of(rows, vocab))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    return draws


def masks_of(rows: list[Row], vocab: int) -> TokenMasks | None:
    masked = [index for index, row in enumerate(rows) if row.grammar is not None]
    if not masked:
        return None
    bits = np.zeros((len(masked), -(-vocab // 32) * 32), np.uint8)
    for place, index in enumerate(masked):
        bits[place, sorted(rows[index].grammar or ())] = 1
    return TokenMasks(masked, np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def shaped(row: Row) -> list[float]:
    """The row's logits after bans, bias and penalties."""
    params, output = row.params, row.held[row.num_prompt :]
    result = []
    for token, value in enumerate(row.logits):
        banned = (
            math.isnan(value)
            or (params.allowed_token_ids is not None and token not in params.allowed_token_ids)
            or (row.grammar is not None and token not in row.grammar)
            or (len(output) < params.min_tokens and token in params.stop_token_ids)
        )
        value = -math.inf if banned else value + params.logit_bias.get(token, 0.0)
        if token in row.held:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        count = output.count(token)
        result.append(value - count * params.frequency_penalty - (count > 0) * params.presence_penalty)
    return result


def possible_draws(row: Row, fallback: int, rounding: float = 1e-5) -> set[int]:
    """The token that the row draws; several where a border or the draw falls within rounding of another answer."""
    params, logits = row.params, shaped(row)
    peak = max(logits)
    if peak == -math.inf:
        return {fallback}
    if params.temperature == 0.0:
        return {token for token, value in enumerate(logits) if value >= peak - rounding}
    number = float(uniform([params.seed], [params.choice], [len(row.held)])[0])
    choice = Choice(params.temperature, params.top_k, params.top_p, params.min_p)
    answers = set()
    for slack in (0.0, rounding, -rounding):
        answers |= drawn(probabilities(logits, choice, slack), number, rounding)
    return answers
