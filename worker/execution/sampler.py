"""Drawing the tokens of one step: rows that need nothing special share one pass, the others are shaped first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.philox import uniform
from kernels.sampling import DrawParameters, greedy, sample
from kernels.shaping import PenalisedRows, Penalties, add_bias, allow, ban
from worker.engine.plan import TokenLogprobs, TokenMasks
from worker.execution.logprobs import PendingLogprobs
from worker.execution.sampled_row import SampledRow


class Draws:
    """What one step drew. ``tokens``: int64 ``[rows]``, on the device."""

    def __init__(self, tokens: torch.Tensor, wanted: list[int], pending: PendingLogprobs | None) -> None:
        self.tokens = tokens
        self._wanted = wanted
        self._pending = pending

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By row, of the drawn tokens of rows that ask for it. Waits for the device."""
        if self._pending is None:
            return {}
        return dict(zip(self._wanted, self._pending.read(), strict=True))


class Sampler:
    """Draws tokens below ``vocab_size`` on ``device``.

    A row that nothing can be drawn from (its grammar, ``allowed_token_ids`` and ``min_tokens`` leave no token, or its
    logits are NaN or -inf throughout) draws the first of ``eos_token_ids`` (token 0 without any), be it forbidden or
    not: the sequence ends, and whoever watches its grammar sees a token that the grammar does not allow.
    """

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._fallback = next(iter(eos_token_ids), 0)
        self._penalties = Penalties(device)

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], held: torch.Tensor, masks: TokenMasks | None = None
    ) -> Draws:
        """One token for each row of ``logits`` ``[rows, vocab]``, which stay as they are.

        ``held``: the sequence table's ``token_ids``, with every token before the rows' positions in place. ``masks``
        name rows by index. The order is told at ``SamplingParams``.
        """
        raw = logits[:, : self._vocab_size]
        shaped = self._shape(raw, rows, held, masks)
        random = [index for index, row in enumerate(rows) if row.sequence.random]
        if not random:
            tokens = greedy(shaped, self._fallback)
        elif len(random) == len(rows):
            tokens = sample(shaped, _parameters(rows), self._fallback)
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            at = self._put(np.array(random))
            tokens[at] = sample(shaped[at], _parameters([rows[index] for index in random]), self._fallback)
            at = self._put(np.array([index for index, row in enumerate(rows) if not row.sequence.random]))
            tokens[at] = greedy(shaped[at], self._fallback)
        wanted, counts = [], []
        for index, row in enumerate(rows):
            count = row.sequence.params.logprobs
            if count is not None:
                wanted.append(index)
                counts.append(count)
        if not wanted:
            return Draws(tokens, wanted, None)
        at = self._put(np.array(wanted))
        return Draws(tokens, wanted, PendingLogprobs(raw[at], tokens[at], counts))

    def _put(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _shape(
        self, raw: torch.Tensor, rows: Sequence[SampledRow], held: torch.Tensor, masks: TokenMasks | None
    ) -> torch.Tensor:
        """The logits that are drawn from: ``raw`` itself if no row is shaped, else a changed copy."""
        special = [index for index, row in enumerate(rows) if row.sequence.is_shaped(row.position)]
        if not special and masks is None:
            return raw
        logits = raw.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        self._allow(logits, rows, special, masks)
        biased = [index for index in special if len(rows[index].sequence.bias)]
        if biased:
            ids = [rows[index].sequence.bias_ids for index in biased]
            bias = np.concatenate([rows[index].sequence.bias for index in biased])
            add_bias(logits, self._put(_repeat(biased, ids)), self._put(np.concatenate(ids)), self._put(bias))
        early = [index for index in special if rows[index].sequence.bans_stops(rows[index].position)]
        if early:
            ids = [rows[index].sequence.stop_ids for index in early]
            ban(logits, self._put(_repeat(early, ids)), self._put(np.concatenate(ids)))
        penalised = [index for index in special if rows[index].sequence.penalised]
        if penalised:
            chosen = [rows[index] for index in penalised]
            params = [row.sequence.params for row in chosen]
            penalties = PenalisedRows(
                np.array(penalised),
                held_rows=np.array([row.held_row for row in chosen]),
                lengths=np.array([row.position for row in chosen]),
                prompts=np.array([row.sequence.num_prompt for row in chosen]),
                repetition=np.array([p.repetition_penalty for p in params], np.float32),
                presence=np.array([p.presence_penalty for p in params], np.float32),
                frequency=np.array([p.frequency_penalty for p in params], np.float32),
            )
            self._penalties.apply(logits, held, penalties)
        return logits

    def _allow(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], special: list[int], masks: TokenMasks | None
    ) -> None:
        """Ban what grammars and ``allowed_token_ids`` leave out."""
        bits: dict[int, npt.NDArray[np.int32]] = {}
        for index in special:
            allowed = rows[index].sequence.allowed_bits(self._vocab_size)
            if allowed is not None:
                bits[index] = allowed
        if masks is not None:
            for index, words in zip(masks.rows, masks.bits, strict=True):
                held = bits.get(index)
                if held is not None:
                    both = min(len(words), len(held))
                    words = words[:both] & held[:both]
                bits[index] = words
        if bits:
            width = max(len(words) for words in bits.values())
            packed = np.zeros((len(bits), width), np.int32)
            for place, words in enumerate(bits.values()):
                packed[place, : len(words)] = words
            allow(logits, self._put(np.array(list(bits))), self._put(packed))


def _parameters(rows: Sequence[SampledRow]) -> DrawParameters:
    params = [row.sequence.params for row in rows]
    return DrawParameters(
        temperature=np.array([p.temperature for p in params], np.float64),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
        uniforms=uniform([p.seed for p in params], [p.choice for p in params], [row.position for row in rows]),
    )


def _repeat(rows: list[int], ids: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.repeat(np.array(rows), [len(some) for some in ids])
